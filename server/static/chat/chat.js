/** The chat page: connects composer, conversation, transcript and settings. */

import { Chats } from "./chats.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { exported, imported } from "./exchange.js";
import { CHAT_SETTINGS } from "./request.js";
import { en } from "./texts/en.js";
import { zh } from "./texts/zh.js";
import { Transcript } from "./transcript.js";
import { fetchJson } from "../shared/api.js";
import { defaultVoice } from "../shared/audio/voices.js";
import { Character } from "../shared/character/character.js";
import { closable } from "../shared/dialogs.js";
import { byId, icon, make } from "../shared/dom.js";
import { download, stamp } from "../shared/download.js";
import { Fields } from "../shared/fields.js";
import { fetchApps, fillHeader } from "../shared/header.js";
import { addTexts, chooseLanguage, label, onLanguage, setPlain, setText, t } from "../shared/i18n.js";
import { addRecent } from "../shared/recent.js";
import { ServerStatus } from "../shared/server-status.js";
import { Settings } from "../shared/settings.js";
import { queueText } from "../shared/socket.js";
import { characterTexts } from "../shared/texts/character.js";
import { applyTheme } from "../shared/theme.js";

const APP = "turnbased";
const SWITCHES = ["spoken", "streaming", "thinking", "detailed"];

addTexts(characterTexts);
addTexts({ en, zh });
applyTheme();

const settings = new Settings("duologue_chat", {
  preset: null, prompt: "", voice: "default", byItem: false, current: "", spoken: false, streaming: true, thinking: false, detailed: true, chat: {},
});
let editing = null; // index of the message that the composed one replaces
let place = null; // the last place in the queue
let state = "idle";

const conversation = new Conversation(prepare, {
  drawn: () => {
    transcript.draw(conversation.messages);
    showControls();
  },
  changed: (index) => transcript.update(index),
  spoken: showControls,
  state: (name, details) => {
    state = name;
    place = details;
    showState();
    showControls();
  },
  failed: ({ error, code }) => (["connection_lost", "connection_refused", "too_large"].includes(code) ? t(code) : error),
  done: (message, { recording_session_id: id }) => {
    byId("spoken").append(make("p", {}, message.text));
    if (id) showRecording(id);
  },
  kept: keep,
});
const transcript = new Transcript(byId("messages"), byId("script"), {
  edit: (index) => {
    conversation.stop();
    editing = index;
    const { text, attachments } = conversation.messages[index];
    composer.fill({ text, attachments });
    showControls();
    byId("text").focus();
  },
  resend: (index) => {
    conversation.resend(index);
    byId("text").focus();
  },
});
const chats = new Chats(settings, {
  leaving: () => conversation.stop(), // which keeps the answer so far
  opened: (messages) => {
    conversation.load(messages);
    stopEditing();
    byId("recording").hidden = true;
  },
});
const composer = new Composer({
  notice: (text) => setPlain(byId("status"), text),
  send: (message) => {
    if (conversation.isBusy) {
      setText(byId("status"), "busy");
      return false;
    }
    conversation.send(message, editing ?? undefined);
    editing = null;
    byId("text").focus();
    return true;
  },
});
const openSettings = make("button", { class: "quiet icon", id: "open-settings", type: "button" }, icon("settings"));
label(openSettings, "settings");
openSettings.onclick = () => byId("settings").showModal();
const header = fillHeader(byId("header"), { current: APP, help: "turnbased", buttons: [openSettings] });
const character = new Character(byId("character"), settings, APP, ["text", "audio", "image"]);
const { chat } = settings.values; // one object, which `Fields` reads at each change of language
new Fields(byId("chat-fields"), CHAT_SETTINGS, chat, (key, value) => {
  if (value === undefined) delete chat[key];
  else chat[key] = value;
  settings.set({ chat });
});
closable(byId("settings"));

async function prepare() {
  const { values } = settings;
  if (!values.spoken) return { system: character.content(null), voice: null, settings: values };
  const voice = (await character.voice()) ?? (await defaultVoice().catch(() => null)); // a server may have none
  return { system: character.content(voice), voice, settings: values };
}

async function keep() {
  const messages = conversation.messages.map(({ isOpen, ...message }) => message);
  if (!(await chats.keep(messages))) setText(byId("status"), "not_kept");
}

const server = new ServerStatus(() => !conversation.isBusy, () => (byId("random").hidden = !server.randomWeights));

function showState() {
  if (state === "queued") setPlain(byId("status"), queueText(place));
  else setText(byId("status"), `state_${state}`);
}

function showControls() {
  const { messages, isBusy, isSpeaking } = conversation;
  byId("empty").hidden = messages.length > 0;
  byId("stop").hidden = !isBusy && !isSpeaking;
  byId("send").disabled = isBusy;
  byId("editing").hidden = editing === null;
  byId("new").hidden = !messages.length;
  for (const id of ["save-text", "export"]) byId(id).disabled = !messages.length;
}

function showRecording(id) {
  addRecent(id, APP);
  byId("recording").href = `/s/${encodeURIComponent(id)}`;
  byId("recording").hidden = false;
}

function stopEditing() {
  editing = null;
  composer.fill({ text: "", attachments: [] });
  showControls();
  byId("text").focus();
}

byId("edit-cancel").onclick = stopEditing;
byId("stop").onclick = () => {
  conversation.stop();
  showControls();
  byId("text").focus();
};
byId("new").onclick = () => chats.begin();
byId("open-chats").onclick = async () => {
  setPlain(byId("chats-state"), "");
  await chats.draw();
  byId("chats").showModal();
};
byId("save-text").onclick = () => {
  const said = ({ role, text, attachments = [] }) => {
    const names = attachments.map(({ name }) => `[${name}]`);
    return `${t(role === "user" ? "you" : "model")}: ${[...names, text].join(" ")}`;
  };
  download(new Blob([conversation.messages.map(said).join("\n\n"), "\n"], { type: "text/plain" }), `chat-${stamp()}.txt`);
};
byId("export").onclick = async () => {
  download(await exported(conversation.messages, character.items), `chat-${stamp()}.json`);
};
byId("import").onchange = async ({ target }) => {
  try {
    const { messages, system } = imported(await target.files[0].text());
    if (system) character.items = system;
    chats.begin(messages);
    keep();
    byId("chats").close();
  } catch (error) {
    setPlain(byId("chats-state"), error.message);
  } finally {
    target.value = "";
  }
};
closable(byId("chats"));
onLanguage(() => byId("chats").open && chats.draw());
for (const name of SWITCHES) {
  byId(`set-${name}`).checked = settings.values[name];
  byId(`set-${name}`).onchange = ({ target }) => settings.set({ [name]: target.checked });
}

/** Read-only state for tests and diagnostics. */
Object.defineProperty(window, "duologue", {
  value: Object.freeze({
    get state() {
      return state;
    },
    get report() {
      const messages = conversation.messages.map(({ sound, attachments, ...rest }) => ({
        ...rest, soundBytes: sound?.size ?? 0, attachments: (attachments ?? []).map(({ kind, name }) => ({ kind, name })),
      }));
      return { state, messages, isSpeaking: conversation.isSpeaking };
    },
  }),
});

async function start() {
  chooseLanguage();
  showControls();
  server.refresh();
  await chats.start();
  fetchApps().then(header.show, () => {}); // the header stays without links
  await character.load();
  const defaults = await fetchJson("/api/frontend_defaults").catch(() => ({})); // the usual ones
  if (defaults.default_lang) chooseLanguage(defaults.default_lang);
  if (defaults.recording && !conversation.isBusy) setText(byId("status"), "recorded");
}

start();
