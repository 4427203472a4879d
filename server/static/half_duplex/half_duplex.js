/** The half-duplex page: connects conversation, transcript and settings. */

import { Conversation } from "./conversation.js";
import { ANSWER_SETTINGS, SPEECH_SETTINGS } from "./settings.js";
import { en } from "./texts/en.js";
import { zh } from "./texts/zh.js";
import { fetchJson } from "../shared/api.js";
import { microphoneField } from "../shared/audio/microphones.js";
import { defaultVoice } from "../shared/audio/voices.js";
import { Character } from "../shared/character/character.js";
import { ask, closable } from "../shared/dialogs.js";
import { byId, icon, make } from "../shared/dom.js";
import { download, stamp } from "../shared/download.js";
import { Fields, nested } from "../shared/fields.js";
import { fetchApps, fillHeader } from "../shared/header.js";
import { addTexts, chooseLanguage, clock, label, onLanguage, setPlain, t } from "../shared/i18n.js";
import { addRecent } from "../shared/recent.js";
import { ServerStatus } from "../shared/server-status.js";
import { Settings } from "../shared/settings.js";
import { queueText } from "../shared/socket.js";
import { characterTexts } from "../shared/texts/character.js";
import { applyTheme } from "../shared/theme.js";
import { Toolbar } from "../shared/toolbar.js";

const APP = "half_duplex_audio";
const ENDS = { interrupted: "cut", length: "limit", failed: "failed" }; // by `stopped` of an answer
const LOUD = 0.15; // RMS of a full meter

addTexts(characterTexts);
addTexts({ en, zh });
applyTheme();

const settings = new Settings("duologue_half_duplex", { preset: null, prompt: "", voice: "default", byItem: false, mic: "", config: {} });
const toolbar = new Toolbar(byId("controls"));
let place = null; // the last place in the queue
let isMuted = false;

const conversation = new Conversation(prepare, {
  mic: () => settings.values.mic,
  state: (_, details) => {
    place = details;
    showState();
  },
  level: (rms) => {
    const level = Math.min(1, rms / LOUD);
    byId("level").style.transform = `scaleX(${level})`;
    byId("orb").style.scale = 1 + 0.5 * level;
  },
  turn: showTurn,
  recorded: (id) => {
    addRecent(id, APP);
    byId("recording").href = `/s/${encodeURIComponent(id)}`;
    byId("recorded").hidden = false;
  },
  failed: (code, text) => setPlain(byId("failure"), code ? t(code) : text),
});

/** Fields of the `prepare` message. */
async function prepare() {
  const voice = (await character.voice()) ?? (await defaultVoice().catch(() => null)); // a server may have none
  return { system_content: character.content(voice), config: nested(config) };
}

const server = new ServerStatus(() => !conversation.isOpen, () => (byId("random").hidden = !server.randomWeights));

function showState() {
  const { state, isOpen, isLive } = conversation;
  byId("stage").dataset.state = state;
  setPlain(byId("state"), state === "queued" ? queueText(place) : t(`state_${state}`));
  const hadFocus = byId("controls").contains(document.activeElement);
  byId("start").hidden = isOpen;
  byId("stop").hidden = !isOpen;
  byId("mute").hidden = !isLive;
  byId("interrupt").hidden = !["thinking", "speaking"].includes(state);
  byId("save").hidden = !conversation.turns.length;
  byId("save-sound").hidden = !conversation.sound;
  toolbar.refresh();
  if (hadFocus && (document.activeElement === document.body || document.activeElement.hidden)) toolbar.focus(byId(isOpen ? "stop" : "start"));
}

function showTurn(index) {
  const list = byId("turns");
  const turn = conversation.turns[index];
  const end = !turn.isOpen && ENDS[turn.stopped];
  const item = make("li", {},
    make("p", { class: "heard" }, t("heard", { seconds: (turn.heardMs / 1000).toFixed(1) })),
    make("p", { class: "text" }, turn.text),
    ...(end ? [make("p", { class: "note" }, t(end))] : []));
  if (list.children[index]) list.children[index].replaceWith(item);
  else list.append(item);
  byId("empty").hidden = true;
  setPlain(byId("count"), String(conversation.turns.length));
  byId("script").scrollTop = byId("script").scrollHeight;
  if (!turn.isOpen && turn.text) byId("spoken").append(make("p", {}, turn.text));
}

function showRemaining() {
  const { endsAt } = conversation;
  setPlain(byId("remaining"), endsAt === null ? "–" : clock((endsAt - performance.now()) / 1000));
}

function mute(on) {
  isMuted = on;
  conversation.mute(on);
  byId("mute").setAttribute("aria-pressed", on);
}

byId("start").onclick = () => {
  byId("turns").replaceChildren();
  byId("spoken").replaceChildren();
  setPlain(byId("failure"), "");
  setPlain(byId("count"), "0");
  byId("recorded").hidden = true;
  mute(false);
  conversation.start();
};
byId("stop").onclick = () => conversation.stop();
byId("interrupt").onclick = () => conversation.interrupt();
byId("mute").onclick = () => mute(!isMuted);
byId("save").onclick = () => {
  const lines = conversation.turns.map(({ heardMs, text }) => `${t("heard", { seconds: (heardMs / 1000).toFixed(1) })}\n${text}`);
  download(new Blob([lines.join("\n\n"), "\n"], { type: "text/plain" }), `conversation-${stamp()}.txt`);
};
byId("save-sound").onclick = () => download(conversation.sound, `conversation-${stamp()}.wav`);
addEventListener("beforeunload", (event) => conversation.isLive && !isLeaving && event.preventDefault());
setInterval(showRemaining, 500);

let isLeaving = false; // the user has agreed
const openSettings = make("button", { class: "quiet icon", id: "open-settings", type: "button" }, icon("settings"));
label(openSettings, "settings");
const refreshMicrophones = microphoneField(byId("set-mic"), settings);
openSettings.onclick = () => {
  refreshMicrophones();
  byId("settings").showModal();
};
const header = fillHeader(byId("header"), {
  current: APP,
  help: "half-duplex",
  buttons: [openSettings],
  mayLeave: async () => {
    isLeaving = !conversation.isOpen || (await ask({ title: "leave_title", text: "leave_text", yes: "leave" }));
    return isLeaving;
  },
});
const character = new Character(byId("character"), settings, APP, ["text", "audio"]);
const { config } = settings.values; // one object, which `Fields` reads at each change of language
const change = (key, value) => {
  if (value === undefined) delete config[key];
  else config[key] = value;
  settings.set({ config });
};
new Fields(byId("speech-fields"), SPEECH_SETTINGS, config, change);
new Fields(byId("answer-fields"), ANSWER_SETTINGS, config, change);
closable(byId("settings"));
onLanguage(() => {
  showState();
  conversation.turns.forEach((_, index) => showTurn(index));
});

/** Read-only state for tests and diagnostics. */
Object.defineProperty(window, "duologue", {
  value: Object.freeze({
    get state() {
      return conversation.state;
    },
    get report() {
      return { state: conversation.state, turns: conversation.turns };
    },
  }),
});

async function start() {
  chooseLanguage();
  server.refresh();
  fetchApps().then(header.show, () => {}); // the header stays without links
  await character.load();
  const defaults = await fetchJson("/api/frontend_defaults").catch(() => ({})); // the usual ones
  if (defaults.default_lang) chooseLanguage(defaults.default_lang);
}

start();
