// Reloads the page when the run that it follows has got further; the place on the page stays.
(() => {
  "use strict";
  let known = null;
  const place = sessionStorage.getItem("place");
  if (place !== null) scrollTo(0, Number(place));
  setInterval(async () => {
    try {
      const answer = await fetch("version", { cache: "no-store" });
      const version = await answer.text();
      if (known !== null && version !== known) {
        sessionStorage.setItem("place", String(scrollY));
        location.reload();
      }
      known = version;
    } catch {
      document.querySelector(".following").textContent = "The command that serves this page has ended; the page stays as it is.";
    }
  }, 2000);
})();
