"use strict";
// Draws the figures in the page's colours, draws them again when the scheme, the paper or the choice of runs changes,
// and lets arrow keys walk along a curve.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const hidden = new Set();
  const live = document.getElementById("live");
  const coarse = matchMedia("(pointer: coarse)").matches;
  const panels = figures.flatMap(figure => figure.panels.map((panel, at) => ({
    ...panel, figure, plot: document.getElementById(`figure-${figure.id}-${at}`),
  })));

  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;
  let known = {};
  const colour = name => known[name] ??= (probe.style.color = `var(${name})`, getComputedStyle(probe).color);
  const dressed = value =>
    typeof value === "string" ? (value === "--diverging" ? diverging() : value.startsWith("--") ? colour(value) : value)
    : Array.isArray(value) ? value.map(dressed)
    : value && typeof value === "object" ? Object.fromEntries(Object.entries(value).map(([k, v]) => [k, dressed(v)]))
    : value;
  const diverging = () => [[0, "#2166ac"], [0.5, colour("--surface")], [1, "#d6604d"]];

  function axis(own) {
    return {
      automargin: true, gridcolor: colour("--grid"), linecolor: colour("--rule"), zerolinecolor: colour("--rule"),
      tickcolor: colour("--rule"), showline: true, ...dressed(own),
      title: { standoff: 8, font: { size: 13 }, ...own?.title },
    };
  }

  function draw({ plot, data, layout, height }) {
    const shown = data.filter(trace => !hidden.has(trace.meta?.group));
    const text = { color: colour("--text"), family: getComputedStyle(document.body).fontFamily };
    const legend = { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 }, bgcolor: "rgba(0,0,0,0)" };
    const label = { bgcolor: colour("--surface"), bordercolor: colour("--muted"), font: { ...text, size: 13 }, namelength: -1 };
    return Plotly.react(plot, dressed(shown), {
      showlegend: false, dragmode: coarse ? false : "zoom", bargap: 0.25, ...dressed(layout),
      width: plot.clientWidth, height, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 8, r: 8, t: 12, b: 8, pad: 0 }, font: { ...text, size: 12 }, hoverlabel: label,
      xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis), legend,
    }, { displayModeBar: false, doubleClick: "reset", showTips: false });
  }

  // What is far from view is drawn when it comes near: a page may hold a hundred figures.
  const stale = new Set(panels), near = new Set();
  const fresh = panel => { if (stale.delete(panel)) { draw(panel); delete panel.plot.dataset.stale; } };
  function drawAll() {
    known = {};
    for (const panel of panels) { stale.add(panel); panel.plot.dataset.stale = "true"; }
    (root.classList.contains("printing") ? panels : [...near]).forEach(fresh);
  }
  const owner = new Map(panels.map(panel => [panel.plot, panel]));
  const watch = new IntersectionObserver(entries => {
    for (const { target, isIntersecting } of entries) {
      const panel = owner.get(target);
      if (isIntersecting) { near.add(panel); fresh(panel); } else near.delete(panel);
    }
    root.dataset.drawn = "true";
  }, { rootMargin: "300px" });

  // The scheme: that of the system until the reader chooses.
  const system = matchMedia("(prefers-color-scheme: dark)");
  const toggle = document.getElementById("scheme");
  const dark = () => root.dataset.scheme ? root.dataset.scheme === "dark" : system.matches;
  const name = () => { toggle.textContent = dark() ? "Light colours" : "Dark colours"; };
  const remember = scheme => { try { localStorage.setItem("incofl-scheme", scheme); } catch { /* a file may not */ } };
  try { root.dataset.scheme = localStorage.getItem("incofl-scheme") ?? ""; } catch { /* likewise */ }
  toggle.addEventListener("click", () => {
    root.dataset.scheme = dark() ? "light" : "dark";
    remember(root.dataset.scheme);
    name();
    drawAll();
  });
  system.addEventListener("change", () => { name(); drawAll(); });

  // Paper has a width of its own, and is white.
  const paper = on => {
    if (root.classList.contains("printing") === on) return;
    root.classList.toggle("printing", on);
    drawAll();
  };
  addEventListener("beforeprint", () => paper(true));
  addEventListener("afterprint", () => paper(false));
  matchMedia("print").addEventListener("change", event => paper(event.matches));

  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width && !root.classList.contains("printing")) { width = innerWidth; drawAll(); }
  });

  // The runs that are shown.
  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const group = Number(button.dataset.group);
      const off = !hidden.has(group);
      if (off) hidden.add(group); else hidden.delete(group);
      button.setAttribute("aria-pressed", String(!off));
      drawAll();
    });
  }

  // Arrow keys walk along the curves; what the pointer would show is shown, and said.
  for (const { plot } of panels) {
    let at = -1;
    plot.addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") { Plotly.Fx.unhover(plot); at = -1; }
      if (!step) return;
      event.preventDefault();
      fresh(owner.get(plot));
      const main = plot.data.filter(trace => trace.hoverinfo !== "skip" && trace.x?.length);
      if (!main.length) return;
      const count = Math.max(...main.map(trace => trace.x.length));
      at = (at + step + count) % count;
      const points = plot.data.flatMap((trace, curveNumber) =>
        main.includes(trace) && at < trace.x.length && trace.type !== "heatmap" ? [{ curveNumber, pointNumber: at }] : []);
      if (points.length) Plotly.Fx.hover(plot, points);
      live.textContent = main.filter(trace => at < trace.x.length && trace.y)
        .map(trace => `${trace.name}, ${trace.x[at]}: ${trace.y[at]}`).join("; ");
    });
    plot.addEventListener("blur", () => { if (plot.data) Plotly.Fx.unhover(plot); });
  }

  // Each figure's numbers as a table, made when they are asked for; and the figure as a picture.
  const cell = (tag, text, scope) => {
    const made = document.createElement(tag);
    made.textContent = text;
    if (scope) made.scope = scope;
    return made;
  };
  const say = (value, unit) =>
    value === null || value === undefined ? "" : typeof value !== "number" ? String(value)
    : unit === "percent" ? `${(100 * value).toFixed(2)} %`
    : unit === "bytes" ? value.toLocaleString("en")
    : String(Number(value.toPrecision(5)));

  function rowsOf(panel, figure) {
    const x = panel.layout.xaxis?.title?.text ?? "";
    const { data } = panel;
    if (figure.table === "matrix") {
      const [map] = data;
      return [["", ...map.x], ...map.y.map((y, i) => [y, ...map.z[i].map(v => say(v, figure.unit))])];
    }
    if (figure.table === "long") {
      const points = data.flatMap(t => t.x.map((v, i) => [t.name, say(v), say(t.y[i], figure.unit)]));
      return [["run", x, panel.layout.yaxis?.title?.text ?? ""], ...points];
    }
    const all = [...new Set(data.flatMap(trace => trace.x))];
    if (all.every(v => typeof v === "number")) all.sort((a, b) => a - b);
    const columns = data.map(trace => {
      const values = new Map();
      trace.x.forEach((v, i) => values.set(v, [...(values.get(v) ?? []), say(trace.y[i], figure.unit)]));
      return values;
    });
    return [[x, ...data.map(trace => trace.name)], ...all.map(v => [v, ...columns.map(c => (c.get(v) ?? []).join(", "))])];
  }

  function table(panel, figure) {
    const [head, ...body] = rowsOf(panel, figure);
    const made = document.createElement("table");
    made.createCaption().textContent = panel.title || panel.layout.yaxis?.title?.text || figure.title;
    made.createTHead().insertRow().append(...head.map(text => cell("th", text, "col")));
    const rows = made.createTBody();
    for (const [first, ...rest] of body) rows.insertRow().append(cell("th", first, "row"), ...rest.map(v => cell("td", v)));
    return made;
  }

  for (const figure of figures) {
    const card = document.getElementById(`figure-${figure.id}`);
    const details = card.querySelector("details");
    details.addEventListener("toggle", () => {
      const place = details.querySelector(".scroll");
      if (details.open && !place.childElementCount) place.append(...figure.panels.map(panel => table(panel, figure)));
    });
    card.querySelector("button").addEventListener("click", () => {
      panels.filter(panel => panel.figure === figure).forEach(fresh);
      figure.panels.forEach((panel, at) => Plotly.downloadImage(`figure-${figure.id}-${at}`, {
        format: "svg", filename: figure.panels.length > 1 ? `${figure.id}-${at}` : figure.id,
      }));
    });
  }

  name();
  root.classList.toggle("printing", matchMedia("print").matches);
  if (root.classList.contains("printing")) drawAll();
  for (const { plot } of panels) watch.observe(plot);
})();
