"use strict";
// A block of settings is copied by its button.
for (const button of document.querySelectorAll(".code button")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("pre");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1600);
  });
}
// What a mark stands for is told below its picture: of the one under the pointer, or by the arrow keys.
for (const figure of document.querySelectorAll("figure")) {
  const readout = figure.querySelector(".readout");
  for (const svg of figure.querySelectorAll("svg")) {
    const marks = [...svg.querySelectorAll(".mark")];
    let at = -1;
    const tell = (mark) => {
      for (const other of marks) other.classList.toggle("on", other === mark);
      readout.textContent = mark ? mark.querySelector("title").textContent : "";
    };
    svg.tabIndex = 0;
    svg.addEventListener("pointerover", (event) => tell(event.target.closest(".mark")));
    svg.addEventListener("pointerleave", () => tell(null));
    svg.addEventListener("blur", () => tell(null));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      at = at < 0 && step < 0 ? marks.length - 1 : (at + step + marks.length) % marks.length;
      tell(marks[at]);
    });
  }
}
// Paper has no summaries to open.
addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details")) each.open = true; });
