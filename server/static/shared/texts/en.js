/** English texts that several pages use. */

export const en = {
  title: "Duologue",
  home: "Duologue, home",
  apps: "Ways to talk",
  skip: "Skip to the conversation",
  settings: "Settings",
  language: "中文",
  language_label: "中文: switch to Chinese",
  theme_auto: "Colors: as the system",
  theme_light: "Colors: light",
  theme_dark: "Colors: dark",
  app_turnbased: "Chat",
  app_omni: "Video",
  app_audio_duplex: "Voice",
  app_off: "{name} is switched off on this server.",

  start: "Start talking",
  cancel: "Cancel",
  close: "Close",
  stop: "End",
  help: "Help",
  share: "Share",
  by_default: "Default ({value})",
  option_none: "off",
  option_true: "on",
  option_false: "off",
};
