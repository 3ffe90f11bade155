// Play: a text as it is written, token by token, with what speculation did for each.

import { AskError, stream } from "./api.js";
import { busy, h, number, say } from "./dom.js";
import { layOut } from "./play-layout.js";
import { SettingError, request } from "./settings.js";
import { TokenStream } from "./tokens.js";
import { why } from "./why.js";

const KEPT = "specpress.play";
const AT_MOST = "The text ends here because of the most tokens that were asked for.";

/** `<sp-play>`: `state` is shared by all views, see main.js. */
export class Play extends HTMLElement {
  connect(state) {
    this.state = state;
    layOut(this);
    this.listen();
    if (!this.restore()) this.load(this.state.params);
    // What is kept is the state before leaving, not that of the stream which breaks off because of it.
    addEventListener("pagehide", () => {
      this.keep();
      this.left = true;
    });
    addEventListener("pageshow", () => (this.left = false));
  }

  listen() {
    this.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.start();
    });
    this.state.addEventListener("model", () => this.settings.model(this.state.about));
    this.settings.model(this.state.about);
  }

  mode() {
    const chat = this.modes[1].checked;
    this.systemField.hidden = !chat;
    this.talk.hidden = !chat || !this.history.length;
    say(this.promptLabel, chat ? "Your message" : "Prompt");
    if (chat && !this.state.about.chat) {
      this.notice.show("This model has no chat template: serve it with --chat-template FILE, or take Completion.");
    } else if (!this.controller) this.notice.show("");
  }

  // What is asked.

  /** All that decides the text, as texts by name; what is empty is left out. Throws SettingError. */
  values() {
    const out = { mode: this.modes[1].checked ? "chat" : "completion", model: this.state.about.name };
    out.prompt = this.prompt.value;
    if (out.mode === "chat") {
      if (this.system.value) out.system = this.system.value;
      if (this.history.length) out.history = JSON.stringify(this.history);
    }
    return { ...out, ...this.settings.values };
  }

  /** Shows what a link or a kept text was asked with. */
  load(params) {
    const values = Object.fromEntries(params);
    this.history = [];
    try {
      const told = JSON.parse(values.history || "[]");
      this.history = told.map(({ role, content }) => ({ role: String(role), content: String(content) }));
    } catch {
      this.notice.show("The link's conversation cannot be read: it is left out.", "error");
    }
    this.modes[values.mode === "chat" ? 1 : 0].checked = true;
    this.prompt.value = values.prompt ?? "def fibonacci(n):\n";
    this.system.value = values.system ?? "";
    const asked = Object.keys(values).length > 0;
    this.settings.values = asked ? values : { max_tokens: "128" };
    const known = !values.model || this.state.choose(values.model);
    this.showTalk();
    this.mode();
    if (!known) this.notice.show(`The link asks the model “${values.model}”, which is not served here.`, "error");
    else if (values.seed) this.notice.show(`A link to a text with the seed ${values.seed}: Run writes it again.`);
  }

  /** A link was opened: its text, kept or to be asked for. */
  open(params) {
    if (this.asked && new URLSearchParams(this.asked).toString() === params.toString()) return;
    this.abort();
    this.clear();
    this.load(params);
  }

  showTalk() {
    this.talk.replaceChildren(
      ...this.history.map((one) => h("li", { class: one.role }, h("b", {}, one.role), h("p", {}, one.content))),
    );
    this.talk.hidden = !this.history.length;
  }

  // A text.

  clear() {
    this.tokens.cut(0);
    this.text = null;
    this.asked = null;
    this.empty.hidden = false;
    this.reply.hidden = this.resume.hidden = true;
    this.link.disabled = true;
    for (const dd of Object.values(this.stats)) say(dd, "–");
    say(this.why, "");
  }

  start() {
    if (this.controller) return;
    let values;
    try {
      values = this.values();
      request(values);
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      this.notice.show(error.message, "error");
      return;
    }
    this.clear();
    this.write(values);
  }

  goOn() {
    this.write(this.asked);
  }

  abort() {
    this.controller?.abort();
  }

  /** Asks for the text and shows it as it comes. What is shown already stays: the same request gives the same text. */
  async write(values) {
    const controller = new AbortController();
    this.controller = controller;
    this.asked = values;
    this.text = new TokenStream();
    this.place = 0;
    this.finish = null;
    this.times = [];
    this.speed = null;
    this.waiting = [];
    this.empty.hidden = true;
    this.notice.show("");
    this.resume.hidden = this.reply.hidden = true;
    this.busy(true);
    const [path, fields] = request(values);
    let sentence = ["", ""];
    try {
      await stream(path, fields, controller.signal, (event) => this.heard(event));
      this.finish = this.text.finish;
    } catch (error) {
      if (error.name === "AbortError") sentence = ["Stopped.", "note"];
      else if (error instanceof AskError) sentence = [error.message, "error"];
      else throw error;
      this.finish = "stopped";
    } finally {
      this.controller = null;
    }
    this.show();
    this.sentence = this.finish === "length" ? [AT_MOST, "note"] : sentence;
    this.ended();
    this.busy(false);
    this.keep();
  }

  /** Shows that the text is over, and why. */
  ended() {
    this.notice.show(...this.sentence);
    this.resume.hidden = !(this.finish === "stopped" && this.asked.seed && this.tokens.tokens.length);
    this.reply.hidden = !(this.asked.mode === "chat" && this.finish !== "stopped");
    this.empty.hidden = this.tokens.tokens.length > 0;
  }

  busy(is) {
    busy(this, is);
    this.run.disabled = is;
    this.stop.disabled = !is;
  }

  heard(event) {
    const { text } = this;
    this.waiting.push(...text.add(event));
    if (this.asked.seed === undefined && text.seed !== null) {
      this.asked = { ...this.asked, seed: String(text.seed) };
      this.address();
    } else if (this.link.disabled) this.address();
    this.times.push([performance.now(), text.counts.tokens]);
    if (!this.frame) {
      this.frame = requestAnimationFrame(() => this.show());
    }
  }

  /** Shows what came since the last frame. */
  show() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    if (!this.text) return;
    for (const token of this.waiting) {
      const known = this.tokens.tokens[this.place];
      if (known && known.id !== token.id) {
        this.tokens.cut(this.place);
        this.notice.show("This time the text went on differently: what is shown is the new one.");
      }
      this.tokens.put(this.place, token);
      this.place += 1;
    }
    // The last piece may have grown since it was shown.
    const last = this.text.aligner.last;
    if (last && this.place) this.tokens.put(this.place - 1, last);
    this.waiting = [];
    this.figures();
  }

  figures() {
    const { counts } = this.text;
    const { times } = this;
    const now = times.at(-1);
    // Of the last two seconds; of the whole text once it has ended.
    const from = this.finish ? times[0] : times.find(([at]) => at > now?.[0] - 2000);
    const seconds = now && from ? (now[0] - from[0]) / 1000 : 0;
    if (seconds > 0) this.speed = (now[1] - from[1]) / seconds;
    say(this.stats["tokens/s"], number(this.speed, 0));
    say(this.stats["α accepted"], number(counts.alpha));
    say(this.stats["τ a round"], number(counts.tau));
    say(this.stats["γ drafted"], number(counts.gamma));
    say(this.stats.tokens, String(counts.tokens));
    say(this.stats.seed, this.asked.seed ?? "–");
    const about = this.state.about;
    const asked = {
      drafter: this.asked.drafter,
      draft_length: this.asked.draft_length ? Number(this.asked.draft_length) : null,
    };
    say(this.why, why(this.text.recent, asked, about.drafters));
  }

  answer() {
    const { prompt } = this.asked;
    this.history.push({ role: "user", content: prompt }, { role: "assistant", content: this.text.text });
    this.showTalk();
    this.prompt.value = "";
    this.clear();
    this.notice.show("");
    this.prompt.focus();
  }

  // Links, and what a reload finds.

  address() {
    this.link.disabled = false;
    history.replaceState(null, "", `#play?${new URLSearchParams(this.asked)}`);
  }

  async copy() {
    const link = `${location.origin}/#play?${new URLSearchParams(this.asked)}`;
    try {
      await navigator.clipboard.writeText(link);
      this.notice.show("The link is in the clipboard: it writes this text again, with its seed and all settings.");
    } catch {
      this.notice.show("The browser does not let the page copy: the link is this page's address.");
    }
  }

  keep() {
    if (this.left || !this.asked || !this.text) return;
    this.show();
    const { counts, recent, text } = this.text;
    const { asked, finish, speed, sentence } = this;
    const kept = { asked, tokens: this.tokens.tokens, finish, speed, sentence, counts, recent, text };
    try {
      sessionStorage.setItem(KEPT, JSON.stringify(kept));
    } catch {
      sessionStorage.removeItem(KEPT); // too long for the browser's store: the link still gives the same text
    }
  }

  /** Shows what was kept before a reload, and goes on where it was still being written. */
  restore() {
    let kept;
    try {
      kept = JSON.parse(sessionStorage.getItem(KEPT) || "null");
    } catch {
      return false;
    }
    const linked = this.state.params;
    if (!kept || !kept.asked) return false;
    if (linked.size && linked.toString() !== new URLSearchParams(kept.asked).toString()) return false;
    this.load(new URLSearchParams(kept.asked));
    kept.tokens.forEach((token, place) => this.tokens.put(place, token));
    this.asked = kept.asked;
    this.empty.hidden = kept.tokens.length > 0;
    this.address();
    if (kept.finish === null && kept.asked.seed) {
      this.write(kept.asked);
      return true;
    }
    this.text = new TokenStream();
    Object.assign(this.text.counts, kept.counts);
    Object.assign(this.text, { recent: kept.recent, text: kept.text });
    this.times = [];
    this.waiting = [];
    Object.assign(this, { finish: kept.finish, speed: kept.speed, sentence: kept.sentence });
    this.ended();
    this.figures();
    return true;
  }
}
customElements.define("sp-play", Play);
