// From a stream's events to its tokens: where each came from, what was rejected before it, and its piece of the text.

/** Counts of rounds, as the engine counts them. */
export class Counts {
  constructor() {
    Object.assign(this, { tokens: 0, rounds: 0, gained: 0, drafted: 0, accepted: 0, forced: 0 });
    Object.assign(this, { ms: 0, draftMs: 0, promptMs: 0 });
  }

  /** The first round of a text reads its prompt, where it drafts nothing. */
  add(round) {
    const accepted = round.drafted.filter((one) => one.accepted).length;
    const prompt = this.tokens === 0 && round.drafted.length === 0;
    this.tokens += round.gained.length;
    this.drafted += round.drafted.length;
    this.accepted += accepted;
    if (round.drafter === "grammar") this.forced += round.drafted.length;
    if (prompt) {
      this.promptMs += round.ms;
      return;
    }
    this.rounds += 1;
    this.gained += round.gained.length;
    this.ms += round.ms;
    this.draftMs += round.draft_ms;
  }

  get alpha() {
    return this.drafted ? this.accepted / this.drafted : null;
  }

  get tau() {
    return this.rounds ? this.gained / this.rounds : null;
  }

  get gamma() {
    return this.rounds ? this.drafted / this.rounds : null;
  }
}

const isBroken = (name) => name.includes("\ufffd");

/** Characters of `rest` that a token of this name takes at its beginning; -1: none. A tokenizer may drop a first space. */
function taken(rest, name) {
  if (!name) return -1;
  if (rest.startsWith(name)) return name.length;
  const lead = rest.length - rest.trimStart().length;
  return lead && rest.startsWith(name, lead) ? lead + name.length : -1;
}

/** Gives each token its piece of the text: the pieces joined are the text, whatever single tokens read like. */
export class Aligner {
  constructor() {
    this.rest = "";
    this.queue = [];
    this.last = null;
  }

  /** The tokens whose piece is known now; `text` of each is set. The last token that was returned may still grow. */
  add(tokens, text, ended) {
    this.rest += text;
    this.queue.push(...tokens);
    const settled = [];
    while (this.queue.length) {
      const size = this.next(ended);
      if (size < 0) break;
      const token = this.queue.shift();
      token.text = this.rest.slice(0, size);
      this.rest = this.rest.slice(size);
      this.last = token;
      settled.push(token);
    }
    if (ended && this.rest && this.last) {
      this.last.text += this.rest;
      this.rest = "";
    }
    return settled;
  }

  /** Characters of the rest that belong to the first token of the queue; -1: more of the text has to come first. */
  next(ended) {
    const { rest, queue } = this;
    const { name } = queue[0];
    if (isBroken(name)) {
      // Bytes of a character: whole characters come with the last of them.
      const whole = queue.find((one) => !isBroken(one.name));
      if (!whole) return rest || ended ? rest.length : -1;
      const end = whole.name ? rest.indexOf(whole.name) : -1;
      return end < 0 ? (ended || queue.length > 32 ? rest.length : -1) : end;
    }
    const size = taken(rest, name);
    if (size >= 0) return size;
    if (!ended && name.startsWith(rest) && queue.length < 64) return -1;
    // A token that is no text, such as a text's end: one after it matches.
    if (queue.some((one, place) => place && !isBroken(one.name) && taken(rest, one.name) >= 0)) return 0;
    const inside = name ? rest.indexOf(name) : -1;
    if (inside > 0 && this.last) {
      this.last.text += rest.slice(0, inside);
      this.rest = rest.slice(inside);
      return name.length;
    }
    if (ended) return 0;
    return queue.length < 64 ? -1 : rest.length;
  }
}

function scored(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((one) => ({
      name: one.token,
      logprob: one.logprob,
      top: one.top_logprobs.map((other) => [other.token, other.logprob]),
    }));
  }
  return logprobs.tokens.map((name, place) => ({
    name,
    logprob: logprobs.token_logprobs[place],
    top: Object.entries(logprobs.top_logprobs[place] || {}),
  }));
}

/** A text as it is streamed by completions or chats with `logprobs` and `specpress.rounds`. */
export class TokenStream {
  constructor() {
    this.counts = new Counts();
    this.recent = [];
    this.seed = null;
    this.finish = null;
    this.text = "";
    this.round = 0;
    this.aligner = new Aligner();
  }

  /** Tokens that are complete with this event. */
  add(event) {
    if (event.specpress) this.seed = event.specpress.seed;
    const choice = event.choices[0];
    if (!choice) return [];
    const text = choice.text ?? choice.delta?.content ?? "";
    this.text += text;
    if (choice.finish_reason) this.finish = choice.finish_reason;
    const names = scored(choice.logprobs);
    const tokens = (choice.specpress?.rounds || []).flatMap((round) => this.tokensOf(round));
    tokens.forEach((token, place) => Object.assign(token, names[place] || { name: "", logprob: null, top: [] }));
    return this.aligner.add(tokens, text, this.finish !== null);
  }

  tokensOf(round) {
    this.round += 1;
    this.counts.add(round);
    this.recent.push(round);
    if (this.recent.length > 24) this.recent.shift();
    const accepted = round.drafted.filter((one) => one.accepted).length;
    const ghosts = round.drafted.filter((one) => !one.accepted).map((one) => one.text);
    return round.gained.map((id, place) => ({
      id,
      origin: place >= accepted ? "own" : round.drafter === "grammar" ? "forced" : "accepted",
      // Between what was accepted and what the target wrote instead; after all of it where the text ended there.
      ghosts: place === Math.min(accepted, round.gained.length - 1) ? ghosts : [],
      ghostsAfter: place < accepted,
      round: this.round,
      drafter: round.drafter,
      gamma: round.drafted.length,
      kept: accepted,
      ms: round.ms,
      draftMs: round.draft_ms,
    }));
  }
}
