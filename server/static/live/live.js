/** The page: creates the conversation and everything around it, and connects their events. */

import { Camera } from "../shared/camera.js";
import { byId, icon, make } from "../shared/dom.js";
import { ask, closable } from "../shared/dialogs.js";
import { fetchApps, fillHeader } from "../shared/header.js";
import { fetchJson } from "../shared/api.js";
import { addTexts, chooseLanguage, hasText, label, onLanguage, setText, t } from "../shared/i18n.js";
import { addRecent } from "../shared/recent.js";
import { chime } from "../shared/chime.js";
import { applyTheme } from "../shared/theme.js";
import { Toolbar } from "../shared/toolbar.js";
import { change, makeButtons } from "./controls/buttons.js";
import { drawKeys, listenToKeys } from "./controls/keys.js";
import { LENGTHS, More, USUAL_LENGTH } from "./controls/more.js";
import { Panel, sessionConfig } from "./controls/panel.js";
import { TypedInput, pictureOf } from "./controls/typed-input.js";
import { Conversation } from "./conversation/conversation.js";
import { qualityOf } from "./conversation/quality.js";
import { Mixer } from "./input/mixer.js";
import { OwnWords } from "./input/own-words.js";
import { Sources } from "./input/sources.js";
import { pageSettings } from "./page-settings.js";
import { Keepsakes } from "./recording/keepsakes.js";
import { en } from "./texts/en.js";
import { zh } from "./texts/zh.js";
import { showMutedBadge, showQuality, showStall } from "./view/badges.js";
import { Captions } from "./view/captions.js";
import { Plot } from "./view/plot.js";
import { ServerStatus } from "../shared/server-status.js";
import { Stage } from "./view/stage.js";
import { canFullscreen, showSubtitles, toggleFullscreen } from "./view/subtitles.js";
import { drawTiming, showFigures } from "./view/timing.js";
import { callUser, showTitle } from "./view/title.js";

const PLAYBACK_DELAY_MS = 200; // until the server sends its default
const SMALL = matchMedia("(max-width: 640px), (max-height: 600px)"); // too small to open the plot at first
const voiceOnly = location.pathname.startsWith("/audio_duplex");
const mode = voiceOnly ? "audio_duplex" : "omni";
document.body.classList.toggle("immersive", location.pathname.startsWith("/mobile-omni")); // the stage fills the screen
const LIVE_APPS = ["omni", "audio_duplex"];

addTexts({ en, zh });
applyTheme();
makeButtons(byId("controls"));
drawTiming();
drawKeys();

const settings = pageSettings();
const toolbar = new Toolbar(byId("controls"));
const server = new ServerStatus(() => !conversation.isLive && conversation.state !== "paused", showServer);
const stage = new Stage(voiceOnly ? "audio" : "omni", server, toolbar);
const captions = new Captions(byId("turns"), byId("spoken"));
const plot = new Plot(byId("plot"));
const camera = new Camera(byId("preview"));
let serverDelayMs = PLAYBACK_DELAY_MS;
let isDisabled = false; // the server has disabled this kind of conversation
let other = null; // the other kind, if the server offers it: {app_id, route}
let before = "idle"; // the state before this one
let warned = null; // cause of the last warning about the connection

const conversation = new Conversation(camera, conversationSettings, {
  state: showState,
  caption: (turn, text) => {
    byId("empty").hidden = true;
    captions.add(turn, text);
    showSubtitles(captions.newest);
  },
  turnEnded: (turn, cut, heard) => captions.end(turn, cut, heard),
  unit: showUnit,
  gap: () => showFigures(conversation.stats.figures()),
  micLevel: (rms) => stage.level("mic", rms),
  modelLevel: (rms) => stage.level("model", rms),
  error: showError,
  notice,
  opened: (sound) => {
    ownWords.start(sound.capture.track);
    return sources.open(sound);
  },
  adjusted: ({ notes = [] }) => stage.notice(notes.length ? notes.join(" ") : t("notice_adjusted")),
});
const mixer = new Mixer(settings);
const sources = new Sources({ camera, mixer, conversation, settings }, { notice, changed: showSources });
const keepsakes = new Keepsakes({ conversation, captions, camera, mode, notice, voiceOnly });
const panel = new Panel(settings, mode, {
  mic: async (id) => {
    await conversation.useMicrophone(id).catch(() => stage.notice(t("error_mic_missing")));
    if (conversation.sound) ownWords.start(conversation.sound.capture.track);
  },
  camera: (id) => camera.kind === "camera" && sources.openCamera(() => camera.open(id)),
  speaker: (id) => conversation.useSpeaker(id),
  adjust: (fields) => conversation.adjust(fields),
  bargeIn: () => conversation.watchVoice(),
  isLive: () => conversation.isLive || conversation.state === "paused",
  notice,
});
const more = new More({
  flip: () => sources.openCamera(() => camera.flip()),
  screen: () => sources.toggleScreen(),
  file: () => byId("source-file").click(),
  record: () => more.showRecording(keepsakes.toggleRecording()),
  share: () => keepsakes.share(),
  full: () => toggleFullscreen().catch(() => {}), // refused by the browser
  help: () => byId("help").showModal(),
  volume: (volume) => {
    settings.set({ volume });
    if (conversation.sound) conversation.sound.player.volume = volume;
  },
  length: (length) => {
    settings.set({ length });
    conversation.adjust({ config: { length_penalty: LENGTHS[length] ?? settings.values.session.length_penalty ?? USUAL_LENGTH } });
  },
  detailed: (detailed) => {
    settings.set({ detailed });
    camera.detailed = detailed;
  },
  mirror: (mirror) => {
    settings.set({ mirror });
    camera.mirror = mirror;
  },
  torch: (torch) => camera.set({ torch }).catch(() => notice("camera_refused")),
  zoom: (zoom) => camera.set({ zoom }).catch(() => notice("camera_refused")),
}, settings.values);

const ownWords = new OwnWords(settings, {
  words: (text) => conversation.isLive && captions.own(text, []),
  failed: () => notice("own_words_failed"),
});
const typed = new TypedInput({
  notice,
  send: async (text, blobs) => {
    byId("empty").hidden = true;
    const remark = captions.own(text, blobs.map(pictureOf));
    const pictures = await Promise.all(blobs.map(async (blob) => new Uint8Array(await blob.arrayBuffer())));
    const refusal = await conversation.tell(text, pictures);
    if (refusal) remark(`type_${refusal}`);
  },
});

function conversationSettings() {
  const { mic, camera: chosen, speaker, volume, cameraOn, delayMs, bargeIn, bargeInMs } = settings.values;
  return {
    mic, camera: chosen, speaker, volume, prepare,
    wantsCamera: !voiceOnly && cameraOn && !sources.file,
    sendsPictures: !voiceOnly,
    playbackDelayMs: delayMs ?? serverDelayMs,
    bargeIn: { on: bargeIn, confirmMs: bargeInMs },
    prefix: voiceOnly ? "adx_" : "omni_",
  };
}

/** Fields of the `prepare` message, without `spec`. */
async function prepare() {
  const length = LENGTHS[settings.values.length];
  let config;
  try {
    config = { ...(length && { length_penalty: length }), ...sessionConfig(settings.values) };
  } catch {
    throw Object.assign(new Error(t("extra_bad")), { name: "BadConfig" });
  }
  const fields = { config };
  const prompt = settings.values.prompt.trim();
  if (prompt) fields.system_prompt = prompt;
  try {
    const voice = await panel.voice.text();
    if (voice) fields.ref_audio_base64 = voice;
  } catch {
    notice("voice_failed");
  }
  return fields;
}

// --- what is shown -------------------------------------------------------------------------------

function notice(code) {
  stage.notice(t(`notice_${code}`));
}

function showError(code, text) {
  const isLater = (code === "unknown_type" && text.includes("adjust")) || (code === "bad_message" && text.startsWith("adjust."));
  if (isLater) notice("adjust_later");
  else if (code === "bad_config") stage.notice(text);
  else stage.notice(hasText(`error_${code}`) ? t(`error_${code}`) : text);
}

function showState(state, details) {
  if (state === "asking") {
    if (before === "ended") captions.clear();
    plot.clear();
    byId("empty").hidden = captions.entries.length > 0;
    showFigures(conversation.stats.figures());
    captions.start();
    if (captions.entries.length) captions.note("caption_new");
  }
  if (state === "listening" && "recording" in details) onPrepared(details);
  if (state === "reconnecting" && !details.isKept) captions.note("caption_lost");
  if (["preparing", "connecting"].includes(state) && before === "queued") {
    chime(conversation.sound?.context);
    callUser(() => conversation.state);
  }
  if (["ended", "failed"].includes(state)) {
    sources.close();
    ownWords.stop();
    keepsakes.end().then(showKeepsakes);
    more.toggle(false);
    more.showRecording(false);
  }
  before = state;
  captions.isLive = conversation.isLive;
  typed.isVisible = conversation.isLive || state === "paused";
  setText(byId("empty-text"), conversation.isLive ? "empty_live" : "empty_text");
  stage.show(state, details);
  panel.characters.isVisible = stage.state === "idle";
  showPauseButton(state === "paused");
  showSources();
  showKeepsakes();
  showTitle(state, details);
  // A disabled app refuses the socket, which browsers report only as a failed connection.
  if (details.code === "server_unreachable") refreshApps().catch(() => {});
}

function onPrepared({ notes, recording, again }) {
  keepsakes.recordingId = recording;
  if (recording) addRecent(recording, mode);
  if (again) captions.note("caption_again");
  if (notes.length) stage.notice(notes.join(" "));
}

function showUnit(result) {
  plot.add(result);
  showFigures(conversation.stats.figures());
  const { level, cause } = qualityOf(conversation.stats.results, conversation.stats.gaps);
  showQuality(level);
  if (level === 1 && warned !== cause) notice(`slow_${cause}`);
  warned = level === 1 ? cause : null;
}

function showPauseButton(isPaused) {
  change(byId("pause"), { icon: isPaused ? "play" : "pause", text: isPaused ? "resume" : "pause" });
}

function showMuted(on) {
  change(byId("mute"), { icon: on ? "mic-off" : "mic", text: on ? "unmute" : "mute", pressed: on });
  showMutedBadge(on);
}

function showSources() {
  const { kind } = camera;
  stage.showPicture(!voiceOnly && camera.isOn);
  const on = kind === "camera";
  change(byId("camera"), { icon: on ? "camera" : "camera-off", text: "camera", key: on ? "camera_off" : "camera_on", pressed: !on });
  more.refresh({
    ...camera.abilities,
    flip: on && matchMedia("(pointer: coarse)").matches,
    screen: !voiceOnly && "getDisplayMedia" in (navigator.mediaDevices ?? {}),
    mirror: !voiceOnly, detailed: !voiceOnly, share: Boolean(keepsakes.recordingId), full: canFullscreen(),
  });
  more.showScreen(kind === "screen");
}

function showKeepsakes() {
  const offered = { ended: keepsakes.offers, failed: keepsakes.offers }[stage.state] ?? [];
  stage.offer(offered);
  byId("keep").hidden = !captions.entries.length;
}

function showServer() {
  byId("random").hidden = !server.randomWeights;
  if (!conversation.isLive) stage.redraw();
}

stage.onTick = () => showStall(conversation.unansweredS);

// --- controls ------------------------------------------------------------------------------------

byId("card-action").onclick = () => {
  if (isDisabled) openOtherApp();
  else if (conversation.state === "paused") conversation.resume();
  else if (conversation.state === "reconnecting") conversation.reconnect();
  else if (conversation.isOpen) conversation.stop();
  else conversation.start();
};
byId("stop").onclick = () => conversation.stop();
byId("pause").onclick = () => (conversation.state === "paused" ? conversation.resume() : conversation.pause());
byId("interrupt").onclick = () => conversation.interrupt();
byId("mute").onclick = () => {
  conversation.mute(!conversation.muted);
  showMuted(conversation.muted);
};
byId("listen").onclick = () => {
  conversation.forceListen = !conversation.forceListen;
  byId("listen").setAttribute("aria-pressed", conversation.forceListen);
};
byId("camera").onclick = async () => {
  const on = camera.kind === "camera";
  settings.set({ cameraOn: !on });
  if (on) camera.close();
  else await sources.openCamera();
  showSources();
};
byId("save-text").onclick = () => keepsakes.saveText();
byId("save-json").onclick = () => keepsakes.saveJson();
byId("set-keys").checked = settings.values.singleKeys;
byId("set-keys").onchange = ({ target }) => settings.set({ singleKeys: target.checked });
closable(byId("share-dialog"));

listenToKeys({
  isLive: () => conversation.isLive,
  interrupt: () => conversation.interrupt(),
  letters: () => settings.values.singleKeys,
  press: (id) => (id === "open-help" || conversation.isLive || conversation.state === "paused") && byId(id)?.click(),
  closeMore: () => {
    const wasOpen = more.isOpen;
    more.toggle(false);
    return wasOpen;
  },
});

const leaving = () => ask({ title: "leave_title", text: "leave_text", yes: "leave_yes", no: "leave_no" });
addEventListener("beforeunload", (event) => conversation.isLive && !keepsakes.isLeaving && event.preventDefault());

/** Read-only state for tests and diagnostics. */
Object.defineProperty(window, "duologue", {
  value: Object.freeze({
    get state() {
      return conversation.state;
    },
    get report() {
      return { state: conversation.state, ...conversation.stats.report() };
    },
  }),
});

// --- start ---------------------------------------------------------------------------------------

const openSettings = make("button", { class: "quiet icon", id: "open-settings", type: "button" }, icon("settings"));
label(openSettings, "settings");
openSettings.onclick = () => panel.open();
const header = fillHeader(byId("header"), {
  current: mode,
  help: voiceOnly ? "audio-duplex" : "omni",
  buttons: [openSettings],
  mayLeave: async () => {
    if (!conversation.isOpen) return true;
    keepsakes.isLeaving = await leaving();
    return keepsakes.isLeaving;
  },
});

/** Update the enabled kinds of conversation, and whether this one is among them. @throws {Error|TypeError} */
async function refreshApps() {
  const apps = await fetchApps();
  header.show(apps);
  if (conversation.isOpen) return; // a running conversation continues
  const wasDisabled = isDisabled;
  isDisabled = !apps.some(({ app_id: id }) => id === mode);
  other = apps.find(({ app_id: id }) => id !== mode && LIVE_APPS.includes(id)) ?? null;
  if (isDisabled) stage.show("disabled", { other: other?.app_id });
  else if (wasDisabled) stage.show("idle");
  panel.characters.isVisible = stage.state === "idle";
}

/** Go to the other kind of conversation; without one, check whether this one is enabled again. */
function openOtherApp() {
  if (other) location.assign(other.route + location.search);
  else refreshApps().catch(() => stage.notice(t("error_server_unreachable_text")));
}

onLanguage(() => {
  byId("plot").dataset.limit = t("plot_limit");
  setText(byId("heading"), `heading_${mode}`);
  plot.draw();
  stage.redraw();
  showFigures(conversation.stats.figures());
  showTitle(conversation.state);
});

async function start() {
  byId("camera").hidden = voiceOnly;
  byId("pace").open = !SMALL.matches;
  camera.detailed = settings.values.detailed;
  camera.mirror = settings.values.mirror;
  showMuted(false);
  showQuality(3);
  chooseLanguage();
  stage.show("idle");
  showKeepsakes();
  showSources();
  server.refresh();
  const [defaults] = await Promise.allSettled([fetchJson("/api/frontend_defaults"), refreshApps()]);
  if (defaults.status === "fulfilled") {
    serverDelayMs = defaults.value.playback_delay_ms ?? serverDelayMs;
    if (defaults.value.default_lang) chooseLanguage(defaults.value.default_lang);
  }
  panel.showDelay(serverDelayMs);
  await Promise.all([panel.characters.load(mode), panel.voice.load()]);
  panel.characters.isVisible = stage.state === "idle";
}

start();
