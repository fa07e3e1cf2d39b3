// Python in the page: a worker made from this text and Pyodide's own (tools/vendor.py joins them).
// It gets every file it needs in its first message, so it never asks the network for anything.
const BASE = "https://kvlab.invalid/";
const TYPES = { wasm: "application/wasm", json: "application/json" };
let answerJson = null;
// Pyodide asks whether this worker can import scripts and, if so, calls itself unsupported. All it
// would import stands in this text already.
self.importScripts = () => { throw new Error("nothing to import"); };

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

async function start({ packed, python }) {
  const files = {};
  for (const [name, text] of Object.entries(packed)) files[name] = await unpack(text);
  self.fetch = async (request) => {
    const name = String(request.url ?? request).replace(BASE, "");
    if (!(name in files)) throw new Error(`Python in the page asked for ${name}: it has no network`);
    const type = TYPES[name.split(".").pop()] ?? "application/octet-stream";
    return new Response(files[name], { headers: { "Content-Type": type } });
  };
  const pyodide = await loadPyodide({
    indexURL: BASE,
    createPyodideModule: _createPyodideModule,
    lockFileContents: new TextDecoder().decode(files["pyodide-lock.json"]),
    packageBaseUrl: BASE,
  });
  for (const [path, text] of Object.entries(python)) {
    const place = `/book/${path}`;
    pyodide.FS.mkdirTree(place.slice(0, place.lastIndexOf("/")));
    pyodide.FS.writeFile(place, text);
  }
  pyodide.runPython("import sys; sys.path.insert(0, '/book')");
  answerJson = pyodide.pyimport("kvlab.notebook.page_questions").answer_json;
}

self.onmessage = async ({ data }) => {
  try {
    if (data.kind === "start") {
      await start(data);
      self.postMessage({ id: data.id, text: "" });
    } else {
      self.postMessage({ id: data.id, text: answerJson(data.function, data.arguments) });
    }
  } catch (error) {
    self.postMessage({ id: data.id, problem: String(error?.message ?? error) });
  }
};
