// Values under the pointer, and the windows of expert load. The page says all the rest without it.
"use strict";

const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const count = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

// The points of a line, from its path: a drawing is 1000 by 1000, whatever its size on the screen.
const pointsOf = (path) =>
  Array.from(path.getAttribute("d").matchAll(/(-?[\d.]+),(-?[\d.]+)/g), (pair) => [Number(pair[1]), Number(pair[2])]);

const nearest = (points, x) => {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - points[low - 1][0] < points[low][0] - x ? points[low - 1] : points[low];
};

for (const plot of document.querySelectorAll(".plot")) {
  const canvas = plot.querySelector(".canvas"), cursor = plot.querySelector(".cursor");
  const [firstStep, lastStep] = plot.dataset.x.split(" ").map(Number);
  const [bottom, top, kind] = plot.dataset.y.split(" ").map((part, place) => (place < 2 ? Number(part) : part));
  const lines = [];
  let tip = null;

  const value = (y) => {
    const share = 1 - y / 1000;
    if (kind === "log") return bottom * Math.pow(top / bottom, share);
    return bottom + share * (top - bottom);
  };

  const show = (event) => {
    if (!tip) {
      for (const path of canvas.querySelectorAll("[data-name]")) {
        lines.push({ name: path.dataset.name, kind: path.classList, points: pointsOf(path) });
      }
      lines.sort((one, other) => one.kind.contains("c8") - other.kind.contains("c8")); // the grey ones are drawn first
      tip = document.createElement("div");
      tip.className = "tip";
      canvas.append(tip);
    }
    const box = canvas.getBoundingClientRect();
    const x = (1000 * (event.clientX - box.left)) / box.width;
    const found = lines.map((line) => ({ ...line, point: nearest(line.points, x) }));
    const closest = found.reduce((best, one) => (Math.abs(one.point[0] - x) < Math.abs(best - x) ? one.point[0] : best), Infinity);
    const rows = found.filter((one) => Math.abs(one.point[0] - closest) < 12).slice(0, 9).map((one) => {
      const row = document.createElement("div"), key = document.createElement("i"), text = document.createElement("b");
      key.className = `key ${Array.from(one.kind).find((name) => /^c\d$/.test(name))}`;
      const read = value(one.point[1]);
      text.textContent = kind === "percent" ? `${number.format(100 * read)} %` : number.format(read);
      row.append(key, text, ` ${one.name}`);
      return row;
    });
    const step = document.createElement("div");
    step.textContent = `step ${count.format(firstStep + (closest / 1000) * (lastStep - firstStep))}`;
    tip.replaceChildren(step, ...rows);
    tip.style.display = cursor.style.display = "block";
    cursor.style.left = `${closest / 10}%`;
    const right = closest > 500;
    tip.style.left = right ? "auto" : `calc(${closest / 10}% + 12px)`;
    tip.style.right = right ? `calc(${100 - closest / 10}% + 12px)` : "auto";
  };

  const hide = () => {
    if (tip) tip.style.display = cursor.style.display = "none";
  };
  canvas.addEventListener("pointermove", show);
  canvas.addEventListener("pointerdown", show);
  canvas.addEventListener("pointerleave", hide);
}

for (const slider of document.querySelectorAll(".slider")) {
  const figure = slider.closest("figure"), input = slider.querySelector("input");
  const captions = input.dataset.captions.split("|");
  slider.hidden = false;
  input.addEventListener("input", () => {
    const place = Number(input.value);
    figure.querySelector(".heat").style.backgroundPosition = `0 ${(100 * place) / (captions.length - 1)}%`;
    figure.querySelector("output").textContent = captions[place];
  });
}
