/** The conversation of this browser, with its attachments, in IndexedDB. */

const DATABASE = "duologue_chat";
const TABLE = "conversations";
const CURRENT = "current";

function open() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function run(mode, act) {
  const database = await open();
  try {
    return await new Promise((resolve, reject) => {
      const transaction = database.transaction(TABLE, mode);
      const request = act(transaction.objectStore(TABLE));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = transaction.onerror = () => reject(transaction.error);
    });
  } finally {
    database.close();
  }
}

/** @returns {Promise<object[]>} messages; empty if the browser stores none */
export const loadMessages = () => run("readonly", (table) => table.get(CURRENT)).then((found) => found ?? [], () => []);

/** Store the messages in place of the former ones. @returns {Promise<boolean>} whether the browser stored them */
export const keepMessages = (messages) => run("readwrite", (table) => table.put(messages, CURRENT)).then(() => true, () => false);
