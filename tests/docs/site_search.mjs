// Asks the search of the documentation site for words, as the browser does: by the theme's own worker.
// Usage: node site_search.mjs SITE INDEX_FOLDER < words.json; prints the pages found for each word, best first.
import fs from "node:fs";
import path from "node:path";
import vm from "node:vm";

const [site, indexFolder] = process.argv.slice(2);
const words = JSON.parse(fs.readFileSync(0, "utf-8"));
const workers = path.join(site, "assets", "javascripts", "workers");
const worker = path.join(workers, fs.readdirSync(workers).find((name) => name.endsWith(".js")));

const answers = [];  // functions that wait for the worker's next message
const context = vm.createContext({
  console, setTimeout, clearTimeout, URL, TextEncoder, TextDecoder,
  document: undefined,
  location: new URL("file://" + worker),
  postMessage: (message) => answers.shift()(message),
});
context.self = context.window = context.globalThis = context;
const listeners = [];
context.addEventListener = (name, listener) => { if (name === "message") listeners.push(listener); };
const load = (name) => vm.runInContext(fs.readFileSync(name, "utf-8"), context, { filename: name });
context.importScripts = (...urls) => urls.forEach((url) => load(path.resolve(workers, String(url).replace("file://", ""))));
load(worker);

function ask(message) {
  return new Promise((resolve) => {
    answers.push(resolve);
    for (const listener of listeners) listener({ data: message });
  });
}

const SETUP = 0, QUERY = 2;
const index = JSON.parse(fs.readFileSync(path.join(indexFolder, "search_index.json"), "utf-8"));
index.options = { suggest: false };
context.base = path.join(site, "assets", "javascripts");
await ask({ type: SETUP, data: index });
const found = {};
for (const word of words) {
  const answer = await ask({ type: QUERY, data: word });
  found[word] = answer.data.items.map((item) => item[0].location.split("#")[0]);
}
console.log(JSON.stringify(found));
