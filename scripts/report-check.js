// For scripts/report-check: is the page as wide as the screen, and can its text be read? Writes the answer to
// the attribute data-found of <html>.
"use strict";
// Contrast of text to its background, by WCAG 2: 4.5, large text 3. Pixels of the smallest text.
const CONTRAST = 4.5, LARGE_CONTRAST = 3, LARGE = 24, SMALLEST = 8.5;

const channels = colour => (colour.match(/[\d.]+/g) || []).map(Number);
const light = colour => {
    const [r, g, b] = channels(colour).map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const background = element => {
    for (let at = element; at; at = at.parentElement) {
        const colour = getComputedStyle(at).backgroundColor, [, , , alpha = 1] = channels(colour);
        if (alpha === 1) return colour;
    }
    return "rgb(255, 255, 255)";
};

function problem(element) {
    const style = getComputedStyle(element), svg = element.ownerSVGElement;
    const colour = svg ? style.fill : style.color;
    // A drawing is scaled to its place.
    const size = parseFloat(style.fontSize) * (svg ? element.getScreenCTM().a : 1);
    if (size < SMALLEST) return `text of ${size.toFixed(1)} pixels`;
    const [one, other] = [light(colour), light(background(element))].sort((a, b) => b - a);
    const contrast = (one + 0.05) / (other + 0.05);
    if (contrast < (size >= LARGE ? LARGE_CONTRAST : CONTRAST)) return `contrast ${contrast.toFixed(1)} of ${colour}`;
}

function find() {
    const root = document.documentElement, found = new Map();
    if (root.scrollWidth > innerWidth) return `the page is ${root.scrollWidth} pixels wide`;
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    let count = 0;
    while (texts.nextNode()) {
        const text = texts.currentNode.data.trim(), element = texts.currentNode.parentElement;
        if (!text || ["SCRIPT", "STYLE"].includes(element.tagName) || !element.checkVisibility({contentVisibilityAuto: true})) continue;
        count++;
        const what = problem(element);
        if (what && !found.has(what)) found.set(what, text.slice(0, 40));
    }
    if (!count) return "there is no text";
    return [...found].map(([what, text]) => `${what}: ${text}`).join("; ") ||
        `readable at ${innerWidth}, ${matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"}`;
}

for (const details of document.querySelectorAll("details")) details.open = true;
document.documentElement.dataset.found = find();
