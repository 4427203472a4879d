/** Tables of this browser, in IndexedDB. */

export class Database {
  #name;
  #tables;

  /** @param {string} name @param {string[]} tables their keys are given with each value */
  constructor(name, tables) {
    this.#name = name;
    this.#tables = tables;
  }

  #open() {
    return new Promise((resolve, reject) => {
      const request = indexedDB.open(this.#name, 2);
      request.onupgradeneeded = () => {
        const { result } = request;
        for (const old of [...result.objectStoreNames]) result.deleteObjectStore(old);
        for (const table of this.#tables) result.createObjectStore(table);
      };
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
    });
  }

  /**
   * Run one transaction over all tables.
   * @param {"readonly"|"readwrite"} mode @param {(...tables: IDBObjectStore[]) => IDBRequest} act the request whose
   *   result is returned
   * @throws {DOMException} if the browser stores nothing, or has no room
   */
  async run(mode, act) {
    const database = await this.#open();
    try {
      return await new Promise((resolve, reject) => {
        const transaction = database.transaction(this.#tables, mode);
        const request = act(...this.#tables.map((table) => transaction.objectStore(table)));
        transaction.oncomplete = () => resolve(request.result);
        transaction.onabort = transaction.onerror = () => reject(transaction.error);
      });
    } finally {
      database.close();
    }
  }
}
