// Runs the script of a report without a browser: what it asks plotly.js to draw and says of it, and the tables below.
// usage: node draw.js PAGE.html  (prints JSON: by plot its data, layout and words, by figure its tables)
"use strict";
const { readFileSync } = require("fs");
const vm = require("vm");

const page = readFileSync(process.argv[2], "utf8");
const values = /<script type="application\/json" id="figures">([^]*?)<\/script>/.exec(page)[1];
const script = page.slice(page.lastIndexOf("<script>") + 8, page.lastIndexOf("</script>"));

class Element {
  constructor() {
    Object.assign(this, { dataset: {}, style: {}, children: [], heard: {}, parts: {}, textContent: "", clientWidth: 600 });
    this.classList = { contains: () => false, toggle: () => {} };
  }
  addEventListener(kind, hear) { this.heard[kind] = hear; }
  setAttribute(name, value) { this[name] = value; }
  querySelector(selector) { return this.parts[selector] ??= new Element(); }
  append(...more) { this.children.push(...more); }
  appendChild(child) { this.children.push(child); return child; }
  make() { return this.appendChild(new Element()); }
  createCaption() { return new Element(); }
  createTHead() { return this.make(); }
  createTBody() { return this.make(); }
  insertRow() { return this.make(); }
  get childElementCount() { return this.children.length; }
}

const elements = {}, drawn = {};
const find = id => elements[id] ??= Object.assign(new Element(), { id });
find("figures").textContent = values;
const media = () => ({ matches: false, addEventListener: () => {} });
vm.runInNewContext(script, {
  document: {
    documentElement: new Element(), body: new Element(), getElementById: find,
    createElement: () => new Element(), querySelectorAll: () => [],
  },
  Plotly: { react: (plot, data, layout) => { drawn[plot.id] = { data, layout, words: plot["aria-label"] }; } },
  IntersectionObserver: class {
    constructor(see) { this.see = see; }
    observe(target) { this.see([{ target, isIntersecting: true }]); }
  },
  getComputedStyle: element => ({ color: "#123456", fontFamily: "sans-serif" }),
  matchMedia: media, addEventListener: () => {}, innerWidth: 1000, localStorage: { getItem: () => null },
});

const tables = {};
for (const { id } of JSON.parse(values)) {
  const details = find(`figure-${id}`).querySelector("details");
  details.open = true;
  details.heard.toggle();
  tables[id] = details.querySelector(".scroll").children.map(({ children: [head, body] }) =>
    [head.children[0], ...body.children].map(row => row.children.map(cell => cell.textContent)));
}
console.log(JSON.stringify({ drawn, tables }));
