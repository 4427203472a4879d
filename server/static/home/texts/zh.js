/** Chinese texts of the home page. */

export const zh = {
  skip_home: "跳到对话方式",
  home_title: "想怎样对话？",
  home_lead: "能看、能听、能说，并且与你同时进行的模型。",
  home_progress: "加载进度",
  home_no_modes: "这台服务器目前没有可用的对话方式。",
  home_recent: "最近的会话",
  home_more: "更多页面",
  home_sessions: "全部录制",
  home_admin: "管理",
  home_forget: "从列表中移除",
  home_free: "{total} 个席位中有 {free} 个空闲",
  home_busy: "席位已满，需要排队",
  home_loading: "模型正在加载",
  home_no_worker: "模型没有运行",
  home_waiting: "{n} 人等待",
  home_unreachable: "无法连接服务器。",
  about_omni: "摄像头和麦克风。它边看边听，可以随时打断。",
  about_audio_duplex: "只用麦克风，双方随时都能说话。",
  about_half_duplex_audio: "说完停顿，再听回答。",
  about_turnbased: "输入文字，附上图片、声音和视频，阅读或收听回答。",
};
