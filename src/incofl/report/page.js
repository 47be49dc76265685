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
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x", "cross", "star"];
  const PATTERNS = ["", "/", ".", "x", "\\", "-", "+"];
  const MARKED = 30; // points of a curve that are marked; more would hide the line
  const formats = {
    number: { hoverformat: ".3~g", rangemode: "tozero" },
    percent: { tickformat: "~%", hoverformat: ".1%" },
    bytes: { tickformat: "~s", hoverformat: ".3s", rangemode: "tozero", ticksuffix: "B" },
  };
  const of = (list, at) => list[((at % list.length) + list.length) % list.length];

  // Colour, dash, marker and pattern of a curve: it is told from others by any of them.
  function trace({ name, look, x, y, half, thin }, kind) {
    const color = colour(look < 0 ? "--bad" : `--c${look % 7}`);
    if (kind === "bars") {
      const pattern = { shape: of(PATTERNS, look), fillmode: "overlay", fgcolor: colour("--surface"), size: 7, solidity: 0.25 };
      const error_y = half ? { type: "data", array: half, color: colour("--text"), thickness: 1.4, width: 4 } : {};
      return { type: "bar", name, x, y, marker: { color, pattern }, error_y };
    }
    const made = { type: "scatter", name, x, y };
    if (thin) return { ...made, mode: "lines", line: { color, width: 1 }, opacity: 0.4, hoverinfo: "skip", showlegend: false };
    const marker = { color, symbol: of(SYMBOLS, look), size: 6 };
    if (kind === "dots") {
      const cross = { color, symbol: "x-thin", size: 10, line: { width: 2.5, color } };
      return { ...made, mode: "markers", marker: look < 0 ? cross : marker, hovertemplate: "round %{x}, client %{y}" };
    }
    return { ...made, mode: x.length <= MARKED ? "lines+markers" : "lines", marker, line: { color, dash: of(DASHES, look), width: 2.4 } };
  }

  const axis = (text, format) => ({
    automargin: true, gridcolor: colour("--grid"), linecolor: colour("--rule"), zerolinecolor: colour("--rule"),
    tickcolor: colour("--rule"), showline: true, title: { standoff: 8, font: { size: 13 }, text }, ...format,
  });

  // Panels of one figure have one vertical axis, bars of shares the whole one.
  function rangeOf({ kind, unit, panels }) {
    if (kind === "bars" && unit === "percent") return { range: [0, 1] };
    const values = panels.flatMap(panel => panel.curves.flatMap(curve => curve.y));
    if (kind !== "lines" || panels.length < 2 || !values.length) return {};
    const [low, high] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    return { range: [Math.max(0, low - 0.05 * (high - low)), high + 0.05 * (high - low)] };
  }
  const heightOf = ({ kind, panels }) => kind === "dots" ? 380 : panels.length > 1 ? 250 : 340;
  for (const { plot, figure } of panels) plot.style.minHeight = `${heightOf(figure)}px`;

  function draw({ plot, curves, y, bars, figure }) {
    const { kind, unit, x } = figure;
    const shown = curves.filter(curve => !hidden.has(curve.group));
    const text = { color: colour("--text"), family: getComputedStyle(document.body).fontFamily };
    const legend = { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 }, bgcolor: "rgba(0,0,0,0)" };
    const label = { bgcolor: colour("--surface"), bordercolor: colour("--muted"), font: { ...text, size: 13 }, namelength: -1 };
    const along = kind === "bars" ? { type: "category", categoryorder: "array", categoryarray: bars }
      : x === "bytes" ? formats.bytes : { hoverformat: "d" };
    const upward = kind === "dots" ? { zeroline: false } : { ...formats[unit], ...rangeOf(figure) };
    return Plotly.react(plot, shown.map(curve => trace(curve, kind)), {
      showlegend: curves.length > 1 && curves.every(curve => curve.group === null), bargap: 0.25, barmode: "group",
      dragmode: coarse ? false : "zoom", hovermode: kind === "lines" && x === "round" ? "x unified" : "closest",
      width: plot.clientWidth, height: heightOf(figure), paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 8, r: 8, t: 12, b: 8, pad: 0 }, font: { ...text, size: 12 }, hoverlabel: label,
      xaxis: axis(kind === "bars" ? "" : x, along), yaxis: axis(y, upward), legend,
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
        main.includes(trace) && at < trace.x.length ? [{ curveNumber, pointNumber: at }] : []);
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

  function rowsOf({ curves, y, bars }, { kind, unit, x }) {
    if (kind === "lines" && x !== "round") {
      const points = curves.flatMap(c => c.x.map((v, i) => [c.name, say(v), say(c.y[i], unit)]));
      return [["run", x, y], ...points];
    }
    const all = kind === "bars" ? bars : [...new Set(curves.flatMap(c => c.x))].sort((a, b) => a - b);
    const columns = curves.map(curve => {
      const values = new Map();
      curve.x.forEach((v, i) => values.set(v, [...(values.get(v) ?? []), say(curve.y[i], unit)]));
      return values;
    });
    return [[x, ...curves.map(c => c.name)], ...all.map(v => [v, ...columns.map(c => (c.get(v) ?? []).join(", "))])];
  }

  function table(panel, figure) {
    const [head, ...body] = rowsOf(panel, figure);
    const made = document.createElement("table");
    made.createCaption().textContent = panel.title || panel.y;
    made.createTHead().insertRow().append(...head.map(text => cell("th", text, "col")));
    const rows = made.createTBody();
    for (const [first, ...rest] of body) rows.insertRow().append(cell("th", first, "row"), ...rest.map(v => cell("td", v)));
    return made;
  }

  // What a panel shows, in words for readers who cannot see it: the end of each curve, all bars, counts of dots.
  function describe(panel, { kind, unit, x, title }) {
    const said = panel.curves.filter(curve => !curve.thin).map(curve => {
      const places = curve.x.map(place => typeof place === "string" ? place : `${x} ${say(place)}`);
      const points = places.map((place, i) => `${say(curve.y[i], unit)}${unit === "bytes" ? " bytes" : ""} at ${place}`);
      return `${curve.name}: ${{ lines: points.at(-1), bars: points.join(", "), dots: `${points.length} mark(s)` }[kind]}`;
    });
    return `${[title, panel.title].filter(Boolean).join(", ")}. ${said.join("; ") || "No values yet"}.`;
  }
  for (const panel of panels) panel.plot.setAttribute("aria-label", describe(panel, panel.figure));

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
