"""What is wrong with how a page looks, found in the browser itself."""

from __future__ import annotations

from tests.serve.browser.chromium import Tab

_CUT = """
const wide = document.documentElement.clientWidth, found = [];
if (document.documentElement.scrollWidth > wide) found.push(
  `the page is ${document.documentElement.scrollWidth} wide in ${wide}`);
const name = one => `${one.tagName}.${one.className} ${one.textContent.trim().slice(0, 60)}`;
for (const one of document.body.querySelectorAll('*')) {
  if (one.closest('.skip') || !one.checkVisibility({visibilityProperty: true})) continue;
  const rect = one.getBoundingClientRect(), style = getComputedStyle(one);
  if (!rect.width) continue;
  const own = one.parentElement.closest('.scroll');  // may be scrolled to
  if (!own && (rect.right > wide + 1 || rect.left < -1)) found.push(`sticks out: ${name(one)}`);
  const hides = ['hidden', 'clip'].includes(style.overflowX) && !one.closest('.uplot, svg');
  if (hides && one.scrollWidth > one.clientWidth + 1) found.push(`cut off: ${name(one)}`);
}
return found;
"""

_PALE = """
const parse = text => (text.match(/[\\d.]+/g) ?? []).map(Number);
const behind = one => {
  for (let at = one; at; at = at.parentElement) {
    const found = parse(getComputedStyle(at).backgroundColor);
    if (found.length === 3 || found[3] === 1) return found;
  }
  return [255, 255, 255];
};
const light = rgb => {
  const [r, g, b] = rgb.slice(0, 3).map(value => {
    const part = value / 255;
    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const found = new Set(), walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const one = walk.currentNode.parentElement, text = walk.currentNode.data.trim();
  if (!text || !one.checkVisibility() || one.closest('.skip, title, option, svg')) continue;
  const style = getComputedStyle(one);
  const [low, high] = [light(parse(style.color)), light(behind(one))].sort((a, b) => a - b);
  const ratio = (high + 0.05) / (low + 0.05);
  const name = `${one.tagName}.${one.className} ${text.slice(0, 40)}`;
  if (ratio < 4.5) found.add(`${ratio.toFixed(1)}: ${name}`);
}
return [...found];
"""

_UNNAMED = """
const found = [];
const all = 'a, button, input:not([type=hidden]), select, [role=img]';
for (const one of document.querySelectorAll(all)) {
  const label = one.labels?.[0]?.textContent || one.getAttribute('aria-label') || one.textContent;
  if (!label.trim()) found.push(one.outerHTML.slice(0, 120));
}
for (const one of document.querySelectorAll('.scroll')) {
  const is_named = one.getAttribute('aria-label') && one.tabIndex === 0;
  if (!is_named) found.push(one.outerHTML.slice(0, 120));
}
if (document.querySelectorAll('h1').length > 1) found.push('more than one h1');
const ids = [...document.querySelectorAll('[id]')].map(one => one.id);
for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) found.push(`id ${id} twice`);
return found;
"""


def cut_off(tab: Tab) -> list[str]:
    """Return what sticks out of the window, or is cut off where one cannot scroll to it."""
    return list(tab.run(_CUT))


def pale(tab: Tab) -> list[str]:
    """Return the texts with less contrast than WCAG AA asks for: 4.5 to 1."""
    return list(tab.run(_PALE))


def unnamed(tab: Tab) -> list[str]:
    """Return the controls, pictures and tables that a screen reader could not name."""
    return list(tab.run(_UNNAMED))


_DRAWN = """
const canvas = [...document.querySelectorAll(a[0])];
return canvas.map(one => {
  const data = one.getContext('2d').getImageData(0, 0, one.width, one.height).data;
  const seen = new Set();
  for (let at = 0; at < data.length; at += 4) if (data[at + 3])
    seen.add((data[at] << 16) | (data[at + 1] << 8) | data[at + 2]);
  return seen.size;
});
"""


def colors(tab: Tab, selector: str = "canvas") -> list[int]:
    """Return how many colors each canvas has; a blank one has none."""
    return list(tab.run(_DRAWN, selector))


def stranger(tab: Tab, origin: str) -> list[str]:
    """Return the URLs of other servers that the page has asked for."""
    return [url for url in tab.asked if not url.startswith((f"{origin}/", "data:", "about:"))]
