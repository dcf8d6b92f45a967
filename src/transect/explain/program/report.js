"use strict";
// Draws the timeline of the page: lanes of events, and the gaps between them, from the JSON in #figures.
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const canvas = document.getElementById("timeline"), hover = document.getElementById("hover");
  const drawing = canvas.getContext("2d");
  const lanes = Object.entries(figures.timeline.lanes), names = figures.timeline.names;
  const view = { begin: 0, length: figures.wall_s };
  const row = 26;

  function colour(number) {
    return "hsl(" + ((number * 47) % 360) + " 55% 62%)";
  }

  function draw() {
    const width = canvas.clientWidth || 1000;
    canvas.width = width;
    canvas.height = Math.max(80, (lanes.length + 1) * row + 10);
    drawing.clearRect(0, 0, canvas.width, canvas.height);
    drawing.font = "11px sans-serif";
    const scale = width / view.length;
    lanes.forEach(function (lane, index) {
      for (const event of lane[1]) {
        const x = (event[0] - view.begin) * scale, size = event[1] * scale;
        if (x + size < 0 || x > width) continue;
        drawing.fillStyle = colour(event[2]);
        drawing.fillRect(x, index * row + 4, Math.max(size, 0.5), row - 8);
        if (size > 60) {
          drawing.fillStyle = "#212529";
          drawing.fillText(names[event[2]].slice(0, size / 7), Math.max(x, 0) + 3, index * row + 17);
        }
      }
    });
    for (const gap of figures.timeline.gaps) {
      const x = (gap[0] - view.begin) * scale, size = gap[1] * scale;
      if (x + size < 0 || x > width) continue;
      drawing.fillStyle = gap[2] === "sync" ? "#c92a2a" : gap[2] === "host" ? "#1c7ed6" : "#fab005";
      drawing.fillRect(x, lanes.length * row + 8, Math.max(size, 0.5), 10);
    }
  }

  function at(event) {
    const box = canvas.getBoundingClientRect();
    return { time: view.begin + ((event.clientX - box.left) / box.width) * view.length, y: event.clientY - box.top };
  }

  function say(event) {
    const where = at(event), lane = lanes[Math.floor(where.y / row)];
    let found = null;
    if (lane) {
      for (const each of lane[1]) {
        const inside = each[0] <= where.time && where.time <= each[0] + each[1];
        if (inside && (!found || each[1] < found[1])) found = each;
      }
    } else {
      for (const gap of figures.timeline.gaps) {
        if (gap[0] <= where.time && where.time <= gap[0] + gap[1]) found = [gap[0], gap[1], gap[2]];
      }
    }
    const name = found && (typeof found[2] === "number" ? names[found[2]] : "gap: " + found[2]);
    hover.textContent = found ? name + "  " + (1e3 * found[1]).toFixed(3) + " ms at " + (1e3 * found[0]).toFixed(3) : "\u00a0";
  }

  function zoom(centre, factor) {
    const length = Math.min(figures.wall_s, Math.max(1e-6, view.length * factor));
    view.begin = Math.max(0, Math.min(figures.wall_s - length, centre - ((centre - view.begin) * length) / view.length));
    view.length = length;
    draw();
  }

  let held = null;
  canvas.addEventListener("wheel", function (event) {
    event.preventDefault();
    zoom(at(event).time, event.deltaY < 0 ? 0.8 : 1.25);
  }, { passive: false });
  canvas.addEventListener("mousedown", function (event) { held = at(event).time; });
  window.addEventListener("mouseup", function () { held = null; });
  canvas.addEventListener("mousemove", function (event) {
    if (held === null) { say(event); return; }
    view.begin = Math.max(0, Math.min(figures.wall_s - view.length, view.begin + held - at(event).time));
    draw();
  });
  canvas.addEventListener("dblclick", function () {
    view.begin = 0;
    view.length = figures.wall_s;
    draw();
  });
  window.addEventListener("resize", draw);
  draw();
  document.body.dataset.drawn = String(lanes.length);
})();
