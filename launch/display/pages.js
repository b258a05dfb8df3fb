// A lone surrogate is not a character, and some programs that read a page fail on it.
const wellFormed = (key, value) => typeof value === "string" ? value.replace(/\p{Surrogate}/gu, "\ufffd") : value;
const find = (selector) => document.querySelector(selector);

// All text of models and users enters the page here, as text nodes.
function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = visible(text);
  return element;
}

// Control characters would be invisible, and bidirectional ones would reorder text: show symbols instead.
function visible(text) {
  return text
    .replace(/[\0-\x08\x0b-\x1f]/g, (sign) => String.fromCharCode(0x2400 + sign.charCodeAt(0)))
    .replace(/[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]/g,
      (sign) => "\u27e8U+" + sign.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0") + "\u27e9");
}

// The text of a token, with visible line ends and a mark for an empty token.
function spelled(text) {
  const inner = make("span", text ? "" : "empty");
  visible(text).split("\n").forEach((line, index) => {
    if (index) inner.append(make("span", "break", "\n"));
    if (line) inner.append(line);
  });
  return inner;
}

