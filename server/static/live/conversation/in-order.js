/** Runs asynchronous functions one after the other, in the order in which they were added. */
export class InOrder {
  #last = Promise.resolve();

  /** @param {() => Promise<void>} step @returns {Promise<void>} settled as the step is; later steps run in any case */
  add(step) {
    const own = this.#last.then(step);
    this.#last = own.catch(() => {});
    return own;
  }
}
