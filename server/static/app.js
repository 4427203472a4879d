/** The page: creates the conversation, stage, captions, plot and settings, and connects their events. */

import { Camera } from "./duplex/lib/camera.js";
import { Captions } from "./duplex/lib/captions.js";
import { Conversation } from "./duplex/lib/conversation.js";
import { chooseLanguage, hasText, language, onLanguage, setLanguage, setText, t } from "./duplex/lib/i18n.js";
import { Panel } from "./duplex/lib/panel.js";
import { Plot } from "./duplex/lib/plot.js";
import { Settings } from "./duplex/lib/settings.js";
import { Stage } from "./duplex/lib/stage.js";
import { fetchJson } from "./duplex/lib/voices.js";

const PLAYBACK_DELAY_MS = 200; // until the server sends its default
const SMALL = matchMedia("(max-width: 640px), (max-height: 600px)"); // too small to open the plot at first
const byId = (id) => document.getElementById(id);
const voiceOnly = location.pathname.startsWith("/audio_duplex");
const mode = voiceOnly ? "audio_duplex" : "omni";

const settings = new Settings();
const stage = new Stage(voiceOnly);
const captions = new Captions(byId("turns"), byId("spoken"));
const plot = new Plot(byId("plot"));
const camera = new Camera(byId("preview"));
let startedAt = 0;
let serverDelayMs = PLAYBACK_DELAY_MS;
let isDisabled = false; // the server has disabled this kind of conversation
let other = null; // the other kind, if the server offers it: {app_id, route}

const conversation = new Conversation(
  camera,
  () => ({
    mic: settings.values.mic,
    camera: settings.values.camera,
    speaker: settings.values.speaker,
    detailed: settings.values.detailed,
    wantsCamera: !voiceOnly && settings.values.cameraOn,
    playbackDelayMs: settings.values.delayMs ?? serverDelayMs,
    prefix: voiceOnly ? "adx_" : "omni_",
    prepare,
  }),
  {
    state: showState,
    caption: (turn, text) => {
      byId("empty").hidden = true;
      captions.add(turn, text);
    },
    turnEnded: (turn, cut) => captions.end(turn, cut),
    unit: (result) => {
      plot.add(result);
      showFigures();
    },
    gap: () => showFigures(),
    micLevel: (rms) => stage.level("mic", rms),
    modelLevel: (rms) => stage.level("model", rms),
    error: (code, text) => stage.notice(hasText(`error_${code}`) ? t(`error_${code}`) : text),
    notice,
  },
);

function notice(code) {
  stage.notice(t(`notice_${code}`));
}

/** Fields of the `prepare` message, without `spec`. */
async function prepare() {
  let config;
  try {
    config = settings.sessionConfig();
  } catch {
    throw Object.assign(new Error(t("extra_bad")), { name: "BadConfig" });
  }
  const fields = { config };
  const prompt = settings.values.prompt.trim();
  if (prompt) fields.system_prompt = prompt;
  if (settings.values.detailed && !voiceOnly) fields.max_slice_nums = 2;
  try {
    const voice = await panel.voiceText();
    if (voice) fields.ref_audio_base64 = voice;
  } catch {
    notice("voice_failed");
  }
  return fields;
}

function showState(state, details) {
  if (state === "asking") {
    captions.clear();
    plot.clear();
    byId("empty").hidden = false;
    showFigures();
  }
  if (state === "listening" && !startedAt) {
    startedAt = performance.now();
    captions.start();
    if (details.notes?.length) stage.notice(details.notes.join(" "));
  }
  if (state === "ended" || state === "failed") {
    details = { ...details, durationS: startedAt ? (performance.now() - startedAt) / 1000 : 0 };
    startedAt = 0;
  }
  if (state === "ended" && !details.durationS) state = "idle"; // cancelled before the start
  setText(byId("empty-text"), conversation.isLive ? "empty_live" : "empty_text");
  stage.show(state, details);
  stage.showCamera(camera.isOn);
  // A disabled app refuses the socket, which browsers report only as a failed connection.
  if (details.code === "server_unreachable") refreshApps().catch(() => {});
}

function showFigures() {
  const { units, replyP95, firstSound, late, context, gaps, gapMs } = conversation.stats.figures();
  figure("units", units || null);
  figure("reply", replyP95 && Math.round(replyP95), "ms");
  figure("first", firstSound && Math.round(firstSound), "ms");
  figure("late", units ? late : null, "", late > 0);
  figure("context", context?.toLocaleString(language()));
  figure("gaps", units ? gaps : null, gaps ? `${Math.round(gapMs)} ms` : "", gaps > 0);
}

function figure(name, value, unit = "", bad = false) {
  const element = byId(`figure-${name}`);
  element.textContent = value ?? "–";
  element.classList.toggle("bad", bad);
  if (!unit || value === null || value === undefined) return;
  const small = document.createElement("small");
  small.textContent = unit;
  element.append(small);
}

// --- controls ------------------------------------------------------------------------------------

byId("card-action").onclick = () => {
  if (isDisabled) openOtherApp();
  else if (conversation.state === "paused") conversation.resume();
  else if (conversation.isOpen) conversation.stop();
  else conversation.start();
};
byId("stop").onclick = () => conversation.stop();
byId("pause").onclick = () => (conversation.state === "paused" ? conversation.resume() : conversation.pause());
byId("interrupt").onclick = () => conversation.interrupt();
byId("mute").onclick = () => {
  conversation.mute(!conversation.muted);
  stage.showMuted(conversation.muted);
};
byId("listen").onclick = () => {
  conversation.forceListen = !conversation.forceListen;
  stage.showHold(conversation.forceListen);
};
byId("camera").onclick = () => toggleCamera();
byId("flip").onclick = () => withCamera(() => camera.flip());
byId("language").onclick = () => setLanguage(language() === "zh" ? "en" : "zh", true);

async function toggleCamera() {
  settings.set({ cameraOn: !camera.isOn });
  if (camera.isOn) camera.close();
  else await withCamera(() => camera.open(settings.values.camera));
  stage.showCamera(camera.isOn);
}

/** Open a camera during a conversation, which continues without one if that fails. */
async function withCamera(open) {
  try {
    await open();
  } catch (error) {
    notice(error.name === "NotAllowedError" ? "camera_denied" : "camera_missing");
  }
  if (!conversation.isOpen) camera.close();
  stage.showCamera(camera.isOn);
}

camera.lost = () => {
  stage.showCamera(false);
  notice("camera_lost");
};

/** Space and Escape interrupt, unless the focused control handles the key. */
addEventListener("keydown", (event) => {
  if (event.repeat || !conversation.isLive || byId("settings").open) return;
  const control = event.target.closest("button, a, input, select, textarea, summary");
  if (event.key !== "Escape" && (event.key !== " " || control)) return;
  event.preventDefault();
  conversation.interrupt();
});

// --- start ---------------------------------------------------------------------------------------

const panel = new Panel(settings, mode, serverDelayMs, {
  microphone: (id) => conversation.useMicrophone(id).catch(() => stage.notice(t("error_mic_missing"))),
  camera: (id) => camera.isOn && withCamera(() => camera.open(id)),
  speaker: (id) => conversation.useSpeaker(id),
  notice,
});

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

/** Update the enabled kinds of conversation, and whether this one is among them. @throws {Error|TypeError} */
async function refreshApps() {
  const { apps } = await fetchJson("/api/apps");
  drawApps(apps);
  if (conversation.isOpen) return; // a running conversation continues
  const wasDisabled = isDisabled;
  isDisabled = !apps.some(({ app_id: id }) => id === mode);
  other = apps.find(({ app_id: id }) => id !== mode && hasText(`app_${id}`)) ?? null;
  if (isDisabled) stage.show("disabled", { other: other?.app_id });
  else if (wasDisabled) stage.show("idle");
}

/** Go to the other kind of conversation; without one, check whether this one is enabled again. */
function openOtherApp() {
  if (other) location.assign(other.route + location.search);
  else refreshApps().catch(() => stage.notice(t("error_server_unreachable_text")));
}

function drawApps(apps) {
  const known = apps.filter(({ app_id: id }) => hasText(`app_${id}`));
  const links = known.map(({ app_id: id, route }) => {
    const link = document.createElement("a");
    link.href = route;
    if (id === mode) link.setAttribute("aria-current", "page");
    setText(link, `app_${id}`);
    return link;
  });
  byId("apps").replaceChildren(...(links.length > 1 ? links : []));
}

onLanguage(() => {
  translatePlot();
  stage.redraw();
  showFigures();
});

function translatePlot() {
  byId("plot").dataset.limit = t("plot_limit");
  plot.draw();
}

async function start() {
  byId("camera").hidden = voiceOnly;
  byId("flip").hidden = voiceOnly || !matchMedia("(pointer: coarse)").matches;
  byId("pace").open = !SMALL.matches;
  stage.showMuted(false);
  chooseLanguage();
  stage.show("idle");
  const [defaults] = await Promise.allSettled([fetchJson("/api/frontend_defaults"), refreshApps()]);
  if (defaults.status === "fulfilled") {
    serverDelayMs = defaults.value.playback_delay_ms ?? serverDelayMs;
    if (defaults.value.default_lang) chooseLanguage(defaults.value.default_lang);
    if (settings.values.delayMs === null) byId("set-delay").value = serverDelayMs;
  }
  await panel.load();
}

start();
