/** Keeps the screen on during a conversation. Optional: browsers refuse it on low battery. */

export class WakeLock {
  #lock = null;
  #wanted = false;

  constructor() {
    // Browsers release the lock when the tab is hidden.
    document.addEventListener("visibilitychange", () => this.#wanted && !document.hidden && this.#request());
  }

  hold() {
    if (this.#wanted) return;
    this.#wanted = true;
    this.#request();
  }

  #request() {
    navigator.wakeLock?.request("screen").then(
      (lock) => (this.#wanted ? (this.#lock = lock) : lock.release()),
      () => {},
    );
  }

  release() {
    this.#wanted = false;
    this.#lock?.release();
    this.#lock = null;
  }
}
