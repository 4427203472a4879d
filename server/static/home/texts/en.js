/** English texts of the home page. */

export const en = {
  skip_home: "Skip to the ways to talk",
  home_title: "How would you like to talk?",
  home_lead: "A model that sees, hears and speaks while you do.",
  home_progress: "Progress of loading",
  home_no_modes: "This server offers no way to talk right now.",
  home_recent: "Recent sessions",
  home_more: "More pages",
  home_sessions: "All recordings",
  home_admin: "Administration",
  home_forget: "Remove from this list",
  home_free: "{free} of {total} places are free",
  home_busy: "All places are taken; you will wait in line",
  home_loading: "The model is loading",
  home_no_worker: "The model is not running",
  home_waiting: "{n} waiting",
  home_unreachable: "The server cannot be reached.",
  about_omni: "Camera and microphone. It watches and listens, and you can interrupt it.",
  about_audio_duplex: "Microphone alone. Both sides can speak at any time.",
  about_half_duplex_audio: "Speak, pause, and hear the answer.",
  about_turnbased: "Write, attach pictures, sounds and videos, and read or hear the answer.",
};
