// Adds what a printed page cannot have: a client's numbers wherever it is pointed at, and methods that can be hidden.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const about = {}; // what the picture of the partition says about each client

  document.querySelectorAll("svg.partition rect[fill=transparent]").forEach((column, client) => {
    column.dataset.client = client;
    about[client] = column.textContent.replace(/^client .*?: (?=[\d,]+ samples)/, "");
  });
  const marks = new Map();
  const takes = new Map(); // what a row of who learns from whom says
  document.querySelectorAll("[data-client]").forEach((mark) => {
    const client = mark.dataset.client;
    marks.set(client, [...(marks.get(client) ?? []), mark]);
    if (mark.matches("rect.hit")) takes.set(mark, mark.textContent);
    mark.querySelector("title")?.remove(); // this page shows more than the browser would
  });

  // -- a client -------------------------------------------------------------------------------------------------------
  let shown = null;

  function element(tag, text) {
    const made = document.createElement(tag);
    made.textContent = text;
    return made;
  }

  function show(mark, x, y) {
    const client = mark.dataset.client;
    if (client !== shown) {
      hide();
      shown = client;
      marks.get(client).forEach((mark) => mark.classList.add("on"));
      const [name, samples, figures] = data.clients[client] ?? [client, null, []];
      const table = document.createElement("table");
      table.insertRow().append(...["", "score", "gain", ""].map((head) => element("th", head)));
      figures.forEach(([score, gain, harmed], method) => {
        const row = table.insertRow();
        row.append(element("th", data.methods[method]), element("td", score), element("td", gain));
        row.append(element("td", harmed ? "▼ harmed" : ""));
      });
      const words = about[client] ?? (samples === null ? "" : `${samples} test samples`);
      tip.replaceChildren(element("strong", `Client ${name}`), element("p", words), element("p", takes.get(mark) ?? ""), table);
      tip.hidden = false;
    }
    const left = x + 16 + tip.offsetWidth > innerWidth ? x - 16 - tip.offsetWidth : x + 16;
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(y + 18, innerHeight - tip.offsetHeight - 8))}px`;
  }

  function hide() {
    if (shown === null) return;
    marks.get(shown).forEach((mark) => mark.classList.remove("on"));
    shown = null;
    tip.hidden = true;
  }

  const markAt = (target) => target.closest?.("svg [data-client]");
  document.addEventListener("pointermove", (event) => {
    const mark = markAt(event.target);
    if (mark) show(mark, event.clientX, event.clientY);
    else if (event.pointerType !== "touch" && !document.activeElement?.matches("svg")) hide();
  });
  document.addEventListener("click", (event) => {
    const mark = markAt(event.target);
    if (mark) show(mark, event.clientX, event.clientY);
    else hide();
  });

  // -- the same by keyboard: a figure is focused, arrows go from client to client --------------------------------------
  document.querySelectorAll("svg:has([data-client])").forEach((figure) => {
    const clients = [...figure.querySelectorAll("[data-client]")];
    let at = -1;
    figure.tabIndex = 0;
    figure.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") hide();
      if (step === undefined) return;
      event.preventDefault();
      at = Math.max(0, Math.min(clients.length - 1, at + step));
      const place = clients[at].getBoundingClientRect();
      show(clients[at], place.right, place.top);
    });
    figure.addEventListener("blur", hide);
  });

  // -- methods --------------------------------------------------------------------------------------------------------
  document.querySelectorAll(".legend li").forEach((entry) => {
    const parts = document.querySelectorAll(`[data-method="${entry.dataset.of}"]`);
    entry.tabIndex = 0;
    entry.setAttribute("role", "button");
    entry.setAttribute("aria-pressed", "true");
    const toggle = () => {
      const visible = entry.getAttribute("aria-pressed") !== "true";
      entry.setAttribute("aria-pressed", String(visible));
      parts.forEach((part) => part.classList.toggle("off", !visible));
    };
    entry.addEventListener("click", toggle);
    entry.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      toggle();
    });
  });

  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
})();
