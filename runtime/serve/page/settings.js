// What can be asked of a text: one list for the form, the link and the request.

import { field, h } from "./dom.js";

/** key, label, kind, group, and what the form says of it. `ours`: travels under `specpress`. */
export const SETTINGS = [
  { key: "max_tokens", label: "Max tokens", kind: "number", min: 1, step: 1, group: "Text", start: "128" },
  { key: "min_tokens", label: "Min tokens", kind: "number", min: 0, step: 1, group: "Text" },
  { key: "seed", label: "Seed", kind: "number", min: 0, step: 1, group: "Text", help: "Empty: one is drawn." },
  { key: "stop", label: "Stop sequences", kind: "lines", group: "Text", help: "One a line; the text ends before the first." },
  { key: "ignore_eos", label: "Ignore end of text", kind: "check", group: "Text" },
  { key: "drafter", label: "Drafter", kind: "choice", group: "Speculation", ours: true },
  {
    key: "draft_length",
    label: "Draft length",
    kind: "number",
    min: 0,
    max: 64,
    step: 1,
    group: "Speculation",
    ours: true,
    help: "Tokens a round at most; what pays is chosen up to there.",
  },
  {
    key: "verify",
    label: "Verification",
    kind: "choice",
    choices: ["coupled", "rejection"],
    group: "Speculation",
    ours: true,
    help: "Of sampled drafts. Rejection accepts more; the text then depends on the drafts.",
  },
  { key: "prediction", label: "Prediction", kind: "text", group: "Speculation", help: "Expected output, to draft from." },
  { key: "temperature", label: "Temperature", kind: "number", min: 0, max: 100, step: 0.05, group: "Sampling" },
  { key: "top_p", label: "Top p", kind: "number", min: 0, max: 1, step: 0.01, group: "Sampling" },
  { key: "top_k", label: "Top k", kind: "number", min: -1, step: 1, group: "Sampling" },
  { key: "min_p", label: "Min p", kind: "number", min: 0, max: 1, step: 0.01, group: "Sampling" },
  { key: "repetition_penalty", label: "Repetition penalty", kind: "number", min: 0.01, step: 0.01, group: "Penalties" },
  {
    key: "presence_penalty",
    label: "Presence penalty",
    kind: "number",
    min: -2,
    max: 2,
    step: 0.1,
    group: "Penalties",
  },
  {
    key: "frequency_penalty",
    label: "Frequency penalty",
    kind: "number",
    min: -2,
    max: 2,
    step: 0.1,
    group: "Penalties",
  },
  { key: "logit_bias", label: "Logit bias", kind: "json", group: "Penalties", help: 'By token id: {"50": -100}' },
  {
    key: "schema",
    label: "JSON schema",
    kind: "json",
    group: "Form",
    help: "The text is held to it, and what it forces is drafted.",
  },
  {
    key: "cache_salt",
    label: "Cache salt",
    kind: "text",
    group: "Form",
    help: "Shares cached prompts only with the same.",
  },
];

/** A sentence on a value that cannot be sent. */
export class SettingError extends Error {}

function parsed(setting, text) {
  if (setting.kind === "check") return true;
  if (setting.kind === "lines") return text.split("\n").filter((line) => line !== "");
  if (setting.kind === "json") {
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new SettingError(`${setting.label} is no JSON: ${error.message}.`);
    }
  }
  if (setting.kind !== "number") return text;
  const value = Number(text);
  if (!Number.isFinite(value)) throw new SettingError(`${setting.label} must be a number, but is “${text}”.`);
  if (setting.step === 1 && !Number.isSafeInteger(value)) {
    throw new SettingError(`${setting.label} must be a whole number below 2^53, but is “${text}”.`);
  }
  return value;
}

/** The fields of a request for these values (texts by key; what is empty is left out). Throws SettingError. */
function body(values) {
  const out = {};
  const ours = {};
  for (const setting of SETTINGS) {
    const text = values[setting.key];
    if (text === undefined || text === "") continue;
    const value = parsed(setting, text);
    if (setting.key === "schema") {
      out.response_format = { type: "json_schema", json_schema: { name: "form", schema: value } };
    } else if (setting.key === "prediction") out.prediction = { type: "content", content: value };
    else if (setting.ours) ours[setting.key] = value;
    else out[setting.key] = value;
  }
  if (Object.keys(ours).length) out.specpress = ours;
  return out;
}

/** Endpoint and fields of a text's request: mode, model, prompt, system, history and settings. Throws SettingError. */
export function request(values) {
  const fields = body(values);
  fields.specpress = { ...fields.specpress, rounds: true };
  fields.model = values.model;
  if (values.mode !== "chat") return ["/v1/completions", { ...fields, prompt: values.prompt, logprobs: 5 }];
  const messages = values.history ? JSON.parse(values.history) : [];
  if (values.system) messages.unshift({ role: "system", content: values.system });
  messages.push({ role: "user", content: values.prompt });
  return ["/v1/chat/completions", { ...fields, messages, logprobs: true, top_logprobs: 5 }];
}

/** The form of all settings. `values` has the texts by key; `model(about)` fits choices and hints to a model. */
export class SettingsForm extends HTMLElement {
  inputs = {};

  connectedCallback() {
    if (this.children.length) return;
    const groups = new Map();
    for (const setting of SETTINGS) {
      const input = this.input(setting);
      input.name = setting.key;
      this.inputs[setting.key] = input;
      if (!groups.has(setting.group)) groups.set(setting.group, []);
      const node = field(setting.label, input, setting.help);
      if (setting.kind !== "number" || setting.help) node.classList.add("wide");
      groups.get(setting.group).push(node);
    }
    for (const [name, fields] of groups) {
      const open = innerWidth > 900 && name !== "Penalties" && name !== "Form";
      this.append(h("details", { open }, h("summary", {}, name), h("div", { class: "fields" }, ...fields)));
    }
  }

  input(setting) {
    if (setting.kind === "choice") {
      return h("select", {}, h("option", { value: "" }, "the server's"), ...this.options(setting.choices || []));
    }
    if (setting.kind === "check") return h("input", { type: "checkbox" });
    if (setting.kind === "lines" || setting.kind === "json") return h("textarea", { rows: 3, spellcheck: "false" });
    const { min, max, step, start } = setting;
    const type = setting.kind === "number" ? "number" : "text";
    return h("input", { type, min, max, step: type === "number" ? "any" : step, value: start, autocomplete: "off" });
  }

  options(names) {
    return names.map((name) => h("option", { value: name }, name === "none" ? "none (plain decoding)" : name));
  }

  model(about) {
    const select = this.inputs.drafter;
    const before = select.value;
    select.replaceChildren(h("option", { value: "" }, `the server's (${about.drafters[0]})`));
    select.append(...this.options(about.drafters));
    if (about.drafters.includes(before)) select.value = before;
    for (const [name, value] of Object.entries({
      top_p: 1,
      top_k: 0,
      min_p: 0,
      repetition_penalty: 1,
      ...about.defaults,
    })) {
      if (this.inputs[name]) this.inputs[name].placeholder = String(value);
    }
  }

  get values() {
    const out = {};
    for (const [name, input] of Object.entries(this.inputs)) {
      const text = input.type === "checkbox" ? (input.checked ? "1" : "") : input.value;
      if (input.validity.badInput) throw new SettingError(`${name} is no number.`);
      if (text !== "") out[name] = text;
    }
    return out;
  }

  set values(values) {
    for (const [name, input] of Object.entries(this.inputs)) {
      if (input.type === "checkbox") input.checked = Boolean(values[name]);
      else input.value = values[name] ?? "";
      if (values[name]) input.closest("details").open = true;
    }
  }
}
customElements.define("sp-settings", SettingsForm);
