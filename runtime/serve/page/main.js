// The page: which view is shown, which model is asked, and the key where the server wants one.

import { json, key } from "./api.js";
import { h } from "./dom.js";
import "./compare.js";
import "./play.js";
import "./race.js";
import "./runs.js";
import "./server.js";

const VIEWS = ["play", "race", "compare", "runs", "server"];

/** What the views share. Events: "model" when another model was chosen. */
class State extends EventTarget {
  constructor(data, params) {
    super();
    this.data = data;
    this.params = params;
    this.about = data.models[0];
  }

  /** Chooses a model by name; false where it is not served. */
  choose(name) {
    const about = this.data.models.find((one) => one.name === name);
    if (!about) return false;
    if (about !== this.about) {
      this.about = about;
      this.dispatchEvent(new Event("model"));
    }
    return true;
  }
}

function here() {
  const [name, query] = location.hash.slice(1).split("?", 2);
  return { name: VIEWS.includes(name) ? name : "play", params: new URLSearchParams(query || "") };
}

const notice = document.querySelector("#page-notice");
const dialog = document.querySelector("#key");
const models = document.querySelector("#models");

function showView(name) {
  for (const link of document.querySelectorAll("nav a")) {
    const current = link.hash === `#${name}`;
    if (current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  for (const view of VIEWS) {
    const node = document.querySelector(`sp-${view}`);
    node.hidden = view !== name;
    node.shown?.(view === name);
  }
  document.title = `${name[0].toUpperCase()}${name.slice(1)} · Specpress`;
}

async function begin() {
  let data;
  try {
    data = await json("/page-data");
  } catch (error) {
    if (error.status !== 401) again(error.message);
    return;
  }
  if (!data.models.length) {
    again("The server is still loading its model.");
    return;
  }
  notice.show("");
  const state = new State(data, here().params);
  models.addEventListener("change", () => state.choose(models.value));
  state.addEventListener("model", () => (models.value = state.about.name));
  showView(here().name);
  for (const view of VIEWS) document.querySelector(`sp-${view}`).connect(state);
  fillModels(state);
  addEventListener("hashchange", () => {
    const { name, params } = here();
    showView(name);
    if (name === "play" && params.size) document.querySelector("sp-play").open(params);
  });
}

/** The models to choose from; looks again while one of them is still being loaded. */
async function fillModels(state) {
  models.replaceChildren(...state.data.models.map((one) => h("option", { value: one.name }, one.name)));
  models.value = state.about.name;
  const { original } = state.data;
  if (original === null || state.data.models.some((one) => one.name === original)) return;
  await new Promise((done) => setTimeout(done, 1000));
  try {
    state.data = await json("/page-data");
    state.dispatchEvent(new Event("data"));
  } catch {
    // It is asked again.
  }
  fillModels(state);
}

/** Says why there is nothing yet, and looks again. */
function again(sentence) {
  notice.show(sentence, "error");
  setTimeout(begin, 1000);
}

document.addEventListener("key-wanted", () => {
  notice.show(
    "The server wants a key: ",
    "error",
    h("button", { type: "button", onclick: () => dialog.showModal() }, "Enter it"),
  );
  if (!dialog.open) dialog.showModal();
});
dialog.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const input = dialog.querySelector("input");
  key.set(input.value.trim());
  input.value = "";
  dialog.close();
  if (models.options.length) notice.show("");
  else begin();
});
dialog.querySelector("button.close").addEventListener("click", () => dialog.close());
begin();
