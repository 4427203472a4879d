/** Chinese texts that several pages use. */

export const zh = {
  title: "Duologue",
  home: "Duologue 首页",
  apps: "对话方式",
  skip: "跳到对话",
  settings: "设置",
  language: "English",
  language_label: "English：切换到英文",
  theme_auto: "颜色：跟随系统",
  theme_light: "颜色：浅色",
  theme_dark: "颜色：深色",
  app_turnbased: "聊天",
  app_omni: "视频",
  app_audio_duplex: "语音",
  app_off: "这台服务器已关闭“{name}”。",

  start: "开始对话",
  cancel: "取消",
  close: "关闭",
  stop: "结束",
  help: "帮助",
  share: "分享",
  by_default: "默认（{value}）",
  option_none: "关",
  option_true: "开",
  option_false: "关",
};
