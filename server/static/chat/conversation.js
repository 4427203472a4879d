/** The conversation: its messages, the answer that is being made, and its speech. */

import { Answer } from "./answer.js";
import { requestText } from "./request.js";
import { Player } from "../shared/audio/player.js";
import { Speaker } from "../shared/audio/speaker.js";
import { wavOf } from "../shared/audio/wav.js";

const SPEECH_RATE = 24_000;

export class Conversation {
  #on;
  #prepare;
  #answer = null;
  #speaker = null;
  #blocks = [];
  messages = []; // {role, text, attachments, sound, stopped, error, isOpen}
  isBusy = false;

  /**
   * @param {() => Promise<{system: object[], voice: string|null, settings: object}>} prepare for each request
   * @param {object} on drawn(), changed(index), state(name, message), failed({error, code}), done(message), kept()
   */
  constructor(prepare, on) {
    this.#prepare = prepare;
    this.#on = on;
  }

  get isSpeaking() {
    return this.#speaker?.isPlaying ?? false;
  }

  /** Append the user's message, after the first `keep` messages, and have it answered. */
  send(message, keep = this.messages.length) {
    this.messages = [...this.messages.slice(0, keep), { role: "user", ...message }];
    return this.#ask();
  }

  /** Answer the user's message at this index again; what follows it is removed. */
  resend(index) {
    this.stop();
    this.messages = this.messages.slice(0, index + 1);
    return this.#ask();
  }

  async #ask() {
    this.isBusy = true;
    const asked = this.messages;
    const message = { role: "assistant", text: "", isOpen: true };
    this.messages = [...asked, message];
    this.#blocks = [];
    this.#on.drawn();
    this.#on.state("sending");
    let request;
    try {
      const { system, voice, settings } = await this.#prepare();
      if (settings.spoken) await this.#openSpeaker();
      request = await requestText(asked, system, settings, voice);
    } catch (error) {
      this.#end(message, { error: error.message, code: error instanceof RangeError ? "too_large" : "" });
      return;
    }
    if (!message.isOpen) return; // stopped meanwhile
    this.#speaker?.begin();
    this.#answer = new Answer(request, {
      queued: (place) => this.#on.state("queued", place),
      queue_update: (place) => this.#on.state("queued", place),
      queue_done: () => this.#on.state("reading"),
      prefill_done: () => this.#on.state("answering"),
      chunk: (part) => this.#add(message, part.text_delta ?? "", part.sound),
      done: (done) => {
        this.#add(message, done.text.slice(message.text.length), done.sound);
        message.stopped = done.stopped;
        this.#end(message, null);
        this.#on.done(message, done);
      },
      failed: (failure) => this.#end(message, failure),
    });
  }

  async #openSpeaker() {
    if (this.#speaker) return;
    const context = new AudioContext();
    await Promise.all([context.resume(), Player.load(context)]);
    this.#speaker = new Speaker(context, { changed: () => this.#on.spoken() });
  }

  #add(message, text, sound) {
    message.text += text;
    if (sound) {
      this.#blocks.push(sound);
      this.#speaker?.add(sound);
    }
    if (text) this.#on.changed(this.messages.indexOf(message));
  }

  #end(message, failure) {
    this.#answer = null;
    this.isBusy = false;
    message.isOpen = false;
    if (this.#blocks.length) message.sound = wavOf(this.#blocks, SPEECH_RATE);
    this.#speaker?.end();
    if (failure) message.error = this.#on.failed(failure);
    this.#on.changed(this.messages.indexOf(message));
    this.#on.state("idle");
    this.#on.kept();
  }

  /** Stop the answer and its speech. */
  stop() {
    this.#speaker?.silence();
    if (!this.isBusy) return;
    this.#answer?.stop();
    const message = this.messages.at(-1);
    message.stopped = "user";
    this.#end(message, null);
  }

  /** Show messages that were kept, or none. */
  load(messages) {
    this.stop();
    this.messages = messages;
    this.#on.drawn();
  }
}
