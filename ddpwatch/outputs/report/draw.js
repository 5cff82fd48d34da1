"use strict";
(function () {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const config = {
    responsive: true, displaylogo: false, displayModeBar: false,
  };
  const colored = new Set(["color", "fillcolor", "colorscale"]);
  const touch = window.matchMedia("(pointer: coarse)").matches;

  // Substitutes CSS variables for color names: the style knows whether the page is light or dark.
  function painted(value, key, style) {
    if (typeof value === "string") {
      return colored.has(key) && value.startsWith("var:") ? style.getPropertyValue("--" + value.slice(4)).trim() : value;
    }
    if (Array.isArray(value)) return value.map((each) => painted(each, key, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, painted(each, name, style)]));
  }

  function layoutOf(chart, style, width) {
    const ink = style.getPropertyValue("--ink").trim(), line = style.getPropertyValue("--line").trim();
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, tickfont: { size: 11 } };
    const layout = painted(chart.layout, "", style);
    const room = { l: 46, r: 12, t: layout.title ? 34 : 28, b: 40 };
    return Object.assign(layout, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: chart.height, autosize: !width,
      width: width || undefined, margin: room, dragmode: touch ? false : "zoom",
      font: { family: style.fontFamily, size: 12, color: ink },
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal" },
      title: layout.title ? Object.assign(layout.title, { font: { size: 13 }, x: 0, xanchor: "left" }) : undefined,
      hoverlabel: { bgcolor: style.getPropertyValue("--card").trim(), font: { color: ink } },
      xaxis: Object.assign({}, axis, layout.xaxis), yaxis: Object.assign({}, axis, layout.yaxis),
    });
  }

  function drawAll(paper) {
    const style = getComputedStyle(root);
    const font = getComputedStyle(document.body).fontFamily;
    for (const chart of charts) {
      const place = document.getElementById("chart-" + chart.name);
      const width = paper ? (place.closest(".pair") ? 330 : 680) : 0;
      const layout = layoutOf(chart, style, width);
      layout.font.family = font;
      window.Plotly.react(place, painted(chart.data, "", style), layout, config);
    }
  }

  root.classList.add("drawn");
  for (const each of document.querySelectorAll("details.figures")) each.open = false;
  drawAll(false);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(false));
  window.addEventListener("beforeprint", () => { root.classList.add("paper"); drawAll(true); });
  window.addEventListener("afterprint", () => { root.classList.remove("paper"); drawAll(false); });
})();
