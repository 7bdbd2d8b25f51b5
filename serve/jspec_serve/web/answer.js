// One answer as it grows: its tokens by where they came from, its rounds, its figures.

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const UNIT = 5; // pixels of a draft token in the strip of rounds
const COMPARABLE = 16; // tokens after the first, from which on a speed says something

export class Answer {
  constructor(title, plain) {
    this.node = element("article", plain ? "answer plain" : "answer");
    const heading = element("h3", "", title);
    this.speed = element("span", "speed");
    heading.append(this.speed);
    this.words = element("div", "text");
    this.rounds = element("div", "rounds");
    this.rounds.setAttribute("role", "img");
    this.numbers = element("ul", "numbers");
    this.node.append(heading, this.words, this.rounds, this.numbers);
    this.ids = [];
    this.text = "";
    this.numRounds = this.verified = this.accepted = 0;
    this.cached = 0;
    this.spec = null;
  }

  start() {
    this.started = performance.now();
    this.node.classList.add("running");
  }

  // Takes a chunk of /v1/chat/completions that names its tokens.
  take(chunk) {
    if (chunk.usage) this.cached = chunk.usage.prompt_tokens_details.cached_tokens;
    for (const choice of chunk.choices) {
      this.text += choice.delta.content ?? "";
      if (choice.spec) this.spec = choice.spec;
      this.round(choice.tokens);
    }
    this.show();
  }

  round(tokens) {
    this.newest = performance.now();
    if (this.first === undefined) {
      this.first = this.newest;
      this.atFirst = tokens.ids.length;
    }
    let accepted = 0;
    tokens.ids.forEach((id, number) => {
      const drafted = tokens.drafted[number];
      accepted += drafted;
      const token = element("span", drafted ? "token drafted" : "token own", tokens.texts[number]);
      token.title = `${drafted ? "drafted and accepted" : "the target’s own"} · id ${id}`;
      const rejected = (tokens.verified ?? 0) - accepted;
      if (!drafted && rejected > 0) {
        const mark = element("span", "rejected", rejected);
        mark.title = `${rejected} of ${tokens.verified} verified draft tokens were rejected here`;
        this.words.append(mark);
      }
      this.words.append(token);
    });
    this.ids.push(...tokens.ids);
    if (tokens.verified === null) return; // the end of the prompt
    this.numRounds += 1;
    this.verified += tokens.verified;
    this.accepted += accepted;
    const column = element("div", "round");
    column.title = `verified ${tokens.verified}, accepted ${accepted}`;
    const parts = [element("i"), element("b"), element("u")];
    parts[0].style.height = `${(tokens.verified - accepted) * UNIT}px`;
    parts[1].style.height = `${accepted * UNIT}px`;
    column.append(...parts);
    this.rounds.append(column);
    this.rounds.scrollLeft = this.rounds.scrollWidth;
  }

  get decodeSeconds() {
    return (this.newest - this.first) / 1000;
  }

  get tokensPerSecond() {
    const later = this.ids.length - this.atFirst;
    return later > 0 && this.decodeSeconds > 0 ? later / this.decodeSeconds : null;
  }

  show() {
    const speed = this.tokensPerSecond;
    this.speed.replaceChildren(speed === null ? "–" : speed.toFixed(1), element("small", "", " tokens/s"));
    const perRound = this.numRounds ? (this.ids.length - this.atFirst) / this.numRounds : null;
    const figures = [
      ["tokens", this.ids.length],
      ["first after", `${(this.first - this.started).toFixed(0)} ms`],
      ["rounds", this.numRounds],
      ["tokens a round", perRound === null ? "–" : perRound.toFixed(2)],
      ["accepted", this.verified ? `${this.accepted} of ${this.verified}` : "nothing drafted"],
    ];
    if (this.cached) figures.push(["cached prompt tokens", this.cached]);
    this.numbers.replaceChildren(
      ...figures.map(([name, value]) => {
        const item = element("li", "", `${name} `);
        item.append(element("b", "", value));
        return item;
      }),
    );
    this.rounds.setAttribute("aria-label", `${this.numRounds} rounds verified ${this.verified} draft tokens and accepted ${this.accepted}`);
  }

  end() {
    this.node.classList.remove("running");
    if (this.spec?.off) this.numbers.append(element("li", "", `no speculation: ${this.spec.off}`));
  }
}

// What the two answers have to say about each other.
export function verdict(drafted, plain) {
  const node = element("p", "verdict");
  const length = Math.max(drafted.ids.length, plain.ids.length);
  let shared = 0;
  while (shared < length && drafted.ids[shared] === plain.ids[shared]) shared += 1;
  const same = shared === length;
  const long = Math.min(drafted.ids.length, plain.ids.length) > COMPARABLE;
  const [ours, theirs] = long ? [drafted.tokensPerSecond, plain.tokensPerSecond] : [null, null];
  const ratio = ours && theirs ? `${(ours / theirs).toFixed(2)}× the speed of plain decoding, ` : "";
  node.textContent = same ? `${ratio}the same ${plain.ids.length} tokens` : `${ratio}but other tokens from number ${shared + 1} on`;
  node.classList.toggle("bad", !same || (ours && theirs && ours < theirs));
  return node;
}
