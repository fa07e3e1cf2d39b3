// --- Python -----------------------------------------------------------------------------------

const waiting = new Map();
const listening = new WeakSet();

/** True on the rendered page, where Python must be started; false where a kernel answers. */
const onPage = () => Boolean(globalThis.kvlabPage);

/**
 * Ask Python one question of kvlab.notebook.page_questions.FUNCTIONS. Resolves to the answer; rejects
 * with an Error whose name and message are those of the Python exception. On the rendered page the
 * first question starts Python in the browser (some megabytes, from the page's own folder): ask after
 * the reader has pressed startButton.
 */
async function ask(model, name, args = {}) {
  const text = onPage() ? await globalThis.kvlabPage.ask(name, args) : await askKernel(model, name, args);
  const reply = JSON.parse(text);
  if (reply.error) throw Object.assign(new Error(reply.error.message), { name: reply.error.name });
  return reply.ok;
}

function askKernel(model, name, args) {
  if (!listening.has(model)) {
    listening.add(model);
    model.on("msg:custom", (message) => {
      if (message?.kind !== "kvlab-answer" || !waiting.has(message.id)) return;
      waiting.get(message.id)(message.text);
      waiting.delete(message.id);
    });
  }
  return new Promise((resolve, reject) => {
    const id = freshId("ask");
    waiting.set(id, resolve);
    setTimeout(() => {
      if (waiting.delete(id)) reject(new Error("the kernel did not answer within 60 s: is it running?"));
    }, 60_000);
    model.send({ kind: "kvlab-ask", id, function: name, arguments: args });
  });
}

/**
 * A button that starts Python on the rendered page and then calls onReady once. Where a kernel
 * answers, or Python runs already, onReady is called at once and the element stays empty.
 */
function startButton(onReady) {
  const element = h("div", { class: "kvlab-row" });
  if (!onPage() || globalThis.kvlabPage.running) { queueMicrotask(onReady); return { element }; }
  let done = false;
  const ready = () => {
    if (done) return;
    done = true;
    element.replaceChildren();
    onReady();
  };
  const status = h("span", { role: "status", class: "kvlab-muted" },
    `Python runs in this page: ${globalThis.kvlabPage.size ?? "some megabytes"}, nothing leaves it.`);
  const button = buttonControl({ label: "Start", primary: true, onPress: async () => {
    button.input.disabled = true;
    try {
      await globalThis.kvlabPage.start((text) => { status.textContent = text; });
      ready();
    } catch (error) {
      button.input.disabled = false;
      status.textContent = `Python did not start: ${error.message}`;
      status.className = "kvlab-error";
    }
  } });
  globalThis.kvlabPage.onStarted(ready); // another widget of the page may press first
  element.append(button.element, status);
  return { element, button: button.input };
}
