// Elements, numbers as text, and small line charts. Knows nothing of what is shown.

const SVG = "http://www.w3.org/2000/svg";

/** An element with properties (class, dataset, attributes) and children, which may be text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Writes text only where it has changed, so that selections and screen readers are left alone. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const NONE = "–";

export function count(value) {
  return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en-US");
}

export function rate(value) {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "0";
  return value >= 100 ? count(value) : value.toFixed(1);
}

export function percent(value) {
  return value === null || value === undefined ? NONE : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)}%`;
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 0.9995) return `${Math.round(1000 * value)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function age(value) {
  if (value === null || value === undefined) return NONE;
  return value < 10 ? `${value.toFixed(1)} s` : seconds(value);
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (value >= 1024 && power < names.length - 1) { value /= 1024; power += 1; }
  return `${value.toFixed(power < 2 || value >= 100 ? 0 : value < 10 ? 2 : 1)} ${names[power]}`;
}

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

const FEWEST = 60;

/**
 * A line chart over as many seconds as are known, a minute at least: series are arrays of numbers or null, the
 * newest last. The first is drawn with its area, a second one dashed. `most` fixes the upper end.
 */
export class Spark {
  constructor(label, most = null) {
    this.most = most;
    this.label = label;
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("class", "spark");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.base = this.path("path", "base");
    this.area = this.path("path", "area");
    this.lines = [this.path("path", "line"), this.path("path", "second")];
  }

  path(tag, name) {
    const element = document.createElementNS(SVG, tag);
    element.setAttribute("class", name);
    this.svg.append(element);
    return element;
  }

  draw(...series) {
    const known = series.flat().filter((value) => value !== null);
    const top = this.most ?? Math.max(1e-9, ...known);
    const width = Math.max(FEWEST, series[0].length);
    this.svg.setAttribute("viewBox", `0 0 ${width} 40`);
    this.base.setAttribute("d", `M0 39.5H${width}`);
    series.forEach((values, place) => {
      const start = width - values.length;
      let line = "", area = "", begin = null;
      const close = (x) => { if (begin !== null && place === 0) area += `L${x} 39.5L${begin} 39.5Z`; begin = null; };
      values.forEach((value, index) => {
        const x = start + index + 1;
        if (value === null) { close(x - 1); return; }
        const y = (39 - 37 * Math.min(value / top, 1)).toFixed(2);
        const step = `${begin === null ? "M" : "L"}${x} ${y}`;
        if (begin === null) begin = x;
        line += step;
        area += step;
      });
      close(width);
      this.lines[place].setAttribute("d", line);
      if (place === 0) this.area.setAttribute("d", area);
    });
    const most = known.length ? Math.max(...known) : 0;
    this.svg.setAttribute("aria-label", `${this.label}, highest of the last ${seconds(width)}: ${rate(most)}`);
    return most;
  }
}
