"use strict";
(() => {
  const data = JSON.parse(document.getElementById("maps").textContent);
  const one = (id) => document.getElementById(id);
  const stage = one("stage"), cell = one("cell"), readout = one("readout"), now = one("now"), whole = one("whole");
  const layers = [...document.querySelectorAll(".layer")], words = [...document.querySelectorAll(".word")];
  let shown = 0, kept = 0, place = null;

  function show(number) {
    shown = number;
    for (const layer of layers) layer.hidden = Number(layer.dataset.map) !== number;
    for (const word of words) {
      word.classList.toggle("shown", Number(word.dataset.map) === number);
      word.setAttribute("aria-pressed", String(Number(word.dataset.map) === kept));
    }
    const map = data.maps[number];
    if (now) {
      now.textContent = (number ? map.word : "the whole") + (map.status === "ok" ? "" : ` (nothing to draw: ${map.status})`);
      whole.hidden = kept === 0;
    }
    tell();
  }

  function tell() {
    if (!place || !readout) return;
    const [row, column] = place;
    const whose = shown ? ` of ${data.maps[shown].word}` : "";
    readout.textContent = `row ${row}, column ${column}${whose}: ${data.maps[shown].values[row][column]}`;
    const share = (name) => Number(cell.style.getPropertyValue(name));
    const wide = share("--wide") / data.grid[1], high = share("--high") / data.grid[0];
    cell.style.left = `${share("--left") + column * wide}%`;
    cell.style.top = `${share("--top") + row * high}%`;
    cell.style.width = `${wide}%`;
    cell.style.height = `${high}%`;
    cell.hidden = false;
  }

  function at(event) {
    const area = stage.getBoundingClientRect();
    const share = (name) => Number(cell.style.getPropertyValue(name)) / 100;
    const x = ((event.clientX - area.left) / area.width - share("--left")) / share("--wide");
    const y = ((event.clientY - area.top) / area.height - share("--top")) / share("--high");
    if (x < 0 || x >= 1 || y < 0 || y >= 1) return leave("The model saw nothing here.");
    place = [Math.floor(y * data.grid[0]), Math.floor(x * data.grid[1])];
    tell();
  }

  function leave(text) {
    place = null;
    cell.hidden = true;
    readout.textContent = text;
  }

  if (stage && readout) {
    const rest = readout.textContent;
    stage.addEventListener("pointermove", at);
    stage.addEventListener("pointerdown", at);
    stage.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") leave(rest); });
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    stage.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return leave(rest);
      const move = moves[event.key];
      if (!move) return;
      event.preventDefault();
      const next = place ? [place[0] + move[0], place[1] + move[1]] : [0, 0];
      place = next.map((value, axis) => Math.min(Math.max(value, 0), data.grid[axis] - 1));
      tell();
    });
  }

  for (const word of words) {
    const number = Number(word.dataset.map);
    word.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") show(number); });
    word.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") show(kept); });
    word.addEventListener("focus", () => show(number));
    word.addEventListener("blur", () => show(kept));
    const press = () => { kept = kept === number ? 0 : number; show(kept); };
    word.addEventListener("click", press);
    word.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      press();
    });
  }
  if (whole) whole.addEventListener("click", () => { kept = 0; show(0); });
  if (words.length) show(0);

  const opacity = one("opacity");
  if (opacity) {
    const set = () => {
      one("layers").style.opacity = opacity.value / 100;
      one("percent").textContent = `${opacity.value} %`;
    };
    opacity.addEventListener("input", set);
    set();
  }

  const score = one("score");
  document.querySelectorAll("#coloured span").forEach((word, number) => {
    const own = data.scores[number];
    const say = () => { score.textContent = `${own.word}: ${own.score}`; };
    word.removeAttribute("title");
    word.tabIndex = 0;
    word.setAttribute("role", "note");
    word.setAttribute("aria-label", `${own.word}, score ${own.score}`);
    for (const event of ["pointerenter", "pointerdown", "focus"]) word.addEventListener(event, say);
  });

  async function copy(text, from) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
      from.focus();
    }
    const label = from.textContent;
    from.textContent = "Copied";
    one("said").textContent = "Copied";
    setTimeout(() => { from.textContent = label; one("said").textContent = ""; }, 1500);
  }
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", () => copy(one(button.dataset.copy).textContent, button));
  }
})();
