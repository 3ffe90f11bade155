// In words: what speculation does at the moment, and why nothing is drafted where nothing is.

const NAMES = {
  lookup: "Lookup copies from the text itself, and finds nothing there that ends as the text does now",
  suffix: "Suffix copies from the text itself, and finds nothing there that ends as the text does now",
  prediction: "No predicted text was given, or the text has left it",
  medusa: "The heads proposed nothing",
};

/** A sentence on these rounds, the latest last. `asked`: the request's `specpress`. */
export function why(rounds, asked, drafters) {
  const named = asked.drafter || drafters[0];
  if (named === "none") {
    return asked.drafter
      ? "Nothing is drafted: the drafter “none” was chosen, so every token is the target's own."
      : "Nothing is drafted: this model is served without a drafter. Choose one on the right, such as lookup.";
  }
  if (asked.draft_length === 0) return "Nothing is drafted: the draft length is 0.";
  if (named === "grammar") {
    return "Only what a JSON schema forces is drafted; where the schema leaves a choice, the target writes alone.";
  }
  const late = rounds.slice(-8);
  if (!late.length) return "";
  if (late.some((round) => round.drafted.length)) {
    const accepted = late.flatMap((round) => round.drafted).filter((one) => one.accepted).length;
    const drafted = late.reduce((sum, round) => sum + round.drafted.length, 0);
    return `Of the last ${drafted} drafted tokens ${accepted} were accepted.`;
  }
  if (late.some((round) => round.drafter)) {
    const last = late.findLast((round) => round.drafter).drafter;
    return `Nothing is drafted right now. ${NAMES[last] || `The drafter ${last} proposed nothing`}.`;
  }
  if (rounds.length < 8) return "Nothing is drafted yet: the first rounds measure what plain decoding takes.";
  return (
    "Nothing is drafted right now: by what was measured, a draft would take longer here than it saves. " +
    "It is tried again from time to time. A server that was started with --draft-length N drafts always."
  );
}
