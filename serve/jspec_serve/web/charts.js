// Small line and bar charts, as SVG.

const SPACE = "http://www.w3.org/2000/svg";
const WIDTH = 240;
const HEIGHT = 70;

function shape(tag, attributes) {
  const made = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// A round number that is at least `value`.
function ceiling(value) {
  if (value <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

class Chart {
  constructor(parent, title, scale) {
    const figure = document.createElement("figure");
    figure.className = new.target === BarChart ? "bars" : "lines";
    const caption = document.createElement("figcaption");
    this.now = document.createElement("b");
    caption.append(title, this.now);
    this.drawing = shape("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.scale = document.createElement("div");
    this.scale.className = "scale";
    figure.append(caption, this.drawing, this.scale);
    parent.append(figure);
    this.title = title;
    this.limit = scale;
  }

  frame(shapes, now, ends) {
    this.drawing.replaceChildren(shape("line", { class: "rule", x1: 0, x2: WIDTH, y1: 0.5, y2: 0.5 }), ...shapes);
    this.drawing.setAttribute("aria-label", `${this.title}: ${now}`);
    this.now.textContent = now;
    this.scale.replaceChildren(
      ...ends.map((text) => Object.assign(document.createElement("span"), { textContent: text })),
    );
  }
}

export class LineChart extends Chart {
  // Series are lists of numbers, oldest first; null where nothing was measured.
  draw(series, capacity, now) {
    const known = series.flat().filter((value) => value !== null);
    const top = this.limit ?? ceiling(Math.max(...known, 0));
    const shapes = [];
    series.forEach((values, number) => {
      let line = "";
      let area = "";
      let start = null;
      values.forEach((value, index) => {
        if (value === null) {
          start = null;
          return;
        }
        const x = ((capacity - values.length + index) / Math.max(capacity - 1, 1)) * WIDTH;
        const y = HEIGHT - (Math.min(value, top) / top) * (HEIGHT - 4);
        // A point of its own is a line that goes nowhere: its round ends are seen.
        line += `${start === null ? `M${x.toFixed(1)} ${y.toFixed(1)}` : ""}L${x.toFixed(1)} ${y.toFixed(1)}`;
        if (start === null) start = x;
        const next = values[index + 1];
        area += `${start === x ? `M${x.toFixed(1)} ${HEIGHT}` : ""}L${x.toFixed(1)} ${y.toFixed(1)}`;
        if (next === null || next === undefined) area += `L${x.toFixed(1)} ${HEIGHT}Z`;
      });
      if (number === 0) shapes.push(shape("path", { class: "area", d: area }));
      shapes.push(shape("path", { class: number ? "line second" : "line", d: line }));
    });
    this.frame(shapes, now, [`0 to ${this.limit === 1 ? "100%" : top}`]);
  }
}

export class BarChart extends Chart {
  // Values in [0, 1].
  draw(values, now) {
    const step = WIDTH / Math.max(values.length, 4);
    const bars = values.map((value, index) =>
      shape("rect", { class: "bar", x: index * step + step / 4, width: step / 2, y: HEIGHT - value * (HEIGHT - 4), height: value * (HEIGHT - 4) }),
    );
    this.frame(bars, now, values.length ? values.map((value, index) => `${index + 1}`).concat(Array(Math.max(4 - values.length, 0)).fill("")) : ["no drafts yet"]);
  }
}
