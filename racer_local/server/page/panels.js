// Conversations and settings: beside the page where there is room, else drawers over it.

const $ = (id) => document.getElementById(id);
const PANELS = ["chats", "settings"];
let cameFrom = null;

const isOpen = (panel) => document.body.classList.contains(`with-${panel}`);
const covers = (panel) => getComputedStyle($(panel)).position === "fixed";

export function togglePanel(panel, open = !isOpen(panel)) {
  if (open) for (const other of PANELS) if (other !== panel && covers(other)) togglePanel(other, false);
  document.body.classList.toggle(`with-${panel}`, open && (panel === "settings" || covers(panel)));
  $(`show-${panel}`).setAttribute("aria-expanded", isOpen(panel));
  const covered = PANELS.some((name) => isOpen(name) && covers(name));
  $("scrim").hidden = !covered;
  $("page").inert = covered;
  if (!open) return;
  cameFrom = document.activeElement;
  (panel === "settings" ? $("options").racer : ($("list").querySelector("[tabindex='0']") ?? $("new"))).focus();
}

/** Closes a panel, and the focus goes back where it was; false if it was not open. */
export function closePanel(panel) {
  if (!isOpen(panel)) return false;
  togglePanel(panel, false);
  (cameFrom?.isConnected ? cameFrom : $("text")).focus();
  return true;
}

export const closePanels = () => PANELS.some(closePanel);

for (const panel of PANELS) $(`show-${panel}`).addEventListener("click", () => togglePanel(panel));
for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", closePanels);
$("scrim").addEventListener("click", closePanels);
for (const width of [800, 1100]) {
  const media = matchMedia(`(max-width: ${width}px)`);
  media.addEventListener("change", () => PANELS.forEach((panel) => togglePanel(panel, false)));
}
