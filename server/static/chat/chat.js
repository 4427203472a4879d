/** The chat page: connects composer, conversation, transcript and settings. */

import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { CHAT_SETTINGS } from "./request.js";
import { keepMessages, loadMessages } from "./store.js";
import { en } from "./texts/en.js";
import { zh } from "./texts/zh.js";
import { Transcript } from "./transcript.js";
import { fetchJson } from "../shared/api.js";
import { defaultVoice } from "../shared/audio/voices.js";
import { toBase64 } from "../shared/audio/wire.js";
import { Character } from "../shared/character.js";
import { ask, closable } from "../shared/dialogs.js";
import { byId, icon, make } from "../shared/dom.js";
import { download, stamp } from "../shared/download.js";
import { Fields } from "../shared/fields.js";
import { fetchApps, fillHeader } from "../shared/header.js";
import { addTexts, chooseLanguage, label, setPlain, setText, t } from "../shared/i18n.js";
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
  preset: null, prompt: "", voice: "default", spoken: false, streaming: true, thinking: false, detailed: true, chat: {},
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
const character = new Character(byId("character"), settings, APP);
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
  if (!(await keepMessages(messages))) setText(byId("status"), "not_kept");
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
  for (const id of ["save-text", "save-json", "new"]) byId(id).hidden = !messages.length;
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
byId("new").onclick = async () => {
  if (!(await ask({ title: "new_chat_title", text: "new_chat_text", yes: "new_chat" }))) return;
  conversation.load([]);
  stopEditing();
  byId("recording").hidden = true;
  keep();
};
byId("save-text").onclick = () => {
  const said = ({ role, text, attachments = [] }) => {
    const names = attachments.map(({ name }) => `[${name}]`);
    return `${t(role === "user" ? "you" : "model")}: ${[...names, text].join(" ")}`;
  };
  download(new Blob([conversation.messages.map(said).join("\n\n"), "\n"], { type: "text/plain" }), `chat-${stamp()}.txt`);
};
byId("save-json").onclick = async () => {
  const data = async (blob) => toBase64(new Uint8Array(await blob.arrayBuffer()));
  const messages = await Promise.all(conversation.messages.map(async ({ role, text, attachments = [], sound }) => ({
    role, text,
    attachments: await Promise.all(attachments.map(async ({ kind, name, blob }) => ({ type: kind, name, data: await data(blob) }))),
    ...(sound && { speech_wav: await data(sound) }),
  })));
  download(new Blob([JSON.stringify(messages, null, 1)], { type: "application/json" }), `chat-${stamp()}.json`);
};
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
  const kept = await loadMessages();
  if (kept.length && !conversation.messages.length) conversation.load(kept);
  fetchApps().then(header.show, () => {}); // the header stays without links
  await character.load();
  const defaults = await fetchJson("/api/frontend_defaults").catch(() => ({})); // the usual ones
  if (defaults.default_lang) chooseLanguage(defaults.default_lang);
  if (defaults.recording && !conversation.isBusy) setText(byId("status"), "recorded");
}

start();
