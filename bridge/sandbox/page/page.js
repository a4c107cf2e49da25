// The page of the sandbox. Text from outside is only ever set as text, never as markup.
"use strict";

const LISTED = 60; // how many rows a list shows at first
const MAX_MESSAGES = 10_000; // as many as a snapshot holds
const TRIM_MESSAGES = 1_000;
const MAX_REQUESTS = 1_000;
const NUMBER = /^\+?[1-9][0-9]{3,14}$/;
const NARROW = "(max-width: 760px)";

const $ = (id) => document.getElementById(id);

/** Make an element; `text` is set as text, whatever it contains. */
function make(tag, { text, on, ...properties } = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  if (text !== undefined) element.textContent = text;
  for (const [type, listener] of Object.entries(on ?? {})) element.addEventListener(type, listener);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Make a list show these items; an element is kept while its item has the same key. */
function reconcile(box, items, keyOf, draw) {
  const kept = new Map([...box.children].map((element) => [element.dataset.key, element]));
  const shown = items.map((item) => {
    const key = String(keyOf(item));
    const element = kept.get(key) ?? draw(item);
    kept.delete(key);
    element.dataset.key = key;
    return element;
  });
  for (const element of kept.values()) element.remove();
  let next = box.firstElementChild;
  for (const element of shown) {
    if (element === next) next = next.nextElementSibling;
    else box.insertBefore(element, next);
  }
}

/** The key of a record that is drawn anew whenever it has changed. */
const versionOf = ({ number, version }) => `${number}.${version}`;

// ---- State --------------------------------------------------------------------------------------

const state = {
  about: null, // the snapshot's facts about the sandbox
  phones: new Map(), // number -> {number, items}, the items oldest first
  order: [], // the phones that are listed, newest first
  messages: [], // all messages, oldest first
  keys: new Set(), // of the messages, to recognise repeats
  requests: new Map(), // number -> request, oldest first
  webhooks: new Map(),
  faults: [],
  read: {}, // phone number -> the newest message that was seen
  open: null, // the number whose conversation is shown
  query: "",
  request: null, // the one that is shown in full
  listed: { phones: LISTED, items: LISTED, requests: LISTED },
};

/** Add an item to a conversation, in the order of the numbers; most belong at the end. */
function place(phoneNumber, item) {
  let phone = state.phones.get(phoneNumber);
  if (!phone) state.phones.set(phoneNumber, phone = { number: phoneNumber, items: [] });
  let index = phone.items.length;
  while (index > 0 && phone.items[index - 1].number > item.number) index--;
  phone.items.splice(index, 0, item);
  item.isPlaced = true;
}

/** Add a record to a map, or update the one with its number. */
function upsert(records, kind, record) {
  const item = records.get(record.number) ?? { kind, version: 0, isPlaced: false };
  records.set(record.number, Object.assign(item, record));
  item.version += 1;
  return item;
}

/** A request is shown in a conversation if it brought no message, or not as it should. */
function isTrouble({ fault, status }) {
  if (fault && fault !== "answer") return true;
  return status === null ? Boolean(fault) : status >= 300;
}

function unreadOf({ number, items }) {
  const seen = state.read[number] ?? 0;
  let unread = 0;
  for (let index = items.length - 1; index >= 0 && items[index].number > seen; index--) {
    if (items[index].kind === "message") unread += 1;
  }
  return unread;
}

/** What the changes on the stream do to the state. */
const apply = {
  message(message) {
    const key = message.idempotency_key ?? JSON.stringify([message.to, message.from, message.text]);
    const item = { kind: "message", version: 0, ...message, key, repeats: state.keys.has(key) };
    item.sought = `${message.from ?? ""}\n${message.text}`.toLowerCase();
    state.keys.add(key);
    state.messages.push(item);
    place(message.to, item);
    if (state.messages.length > MAX_MESSAGES + TRIM_MESSAGES) forgetOldest();
  },
  request(request) {
    const item = upsert(state.requests, "request", request);
    if (state.requests.size > MAX_REQUESTS) state.requests.delete(state.requests.keys().next().value);
    if (item.to && !item.isPlaced && isTrouble(item)) place(item.to, item);
  },
  webhook(webhook) {
    const item = upsert(state.webhooks, "webhook", webhook);
    if (item.phone && !item.isPlaced) place(item.phone, item);
  },
  faults(faults) {
    state.faults = faults;
  },
  read({ to, number }) {
    state.read[to] = Math.max(number, state.read[to] ?? 0);
  },
};

function forgetOldest() {
  const { number } = state.messages.splice(0, TRIM_MESSAGES).at(-1);
  state.keys = new Set(state.messages.map(({ key }) => key));
  for (const phone of state.phones.values()) {
    phone.items = phone.items.filter((item) => item.number > number);
    if (!phone.items.length) state.phones.delete(phone.number);
  }
}

function takeSnapshot({ messages, requests, webhooks, faults, read, ...about }) {
  Object.assign(state, {
    about, faults, read, phones: new Map(), messages: [], keys: new Set(), requests: new Map(), webhooks: new Map(),
  });
  // Another sandbox may have given the same numbers to other records.
  for (const id of ["phone-list", "items", "request-list", "webhook-list"]) $(id).replaceChildren();
  messages.forEach(apply.message);
  requests.forEach(apply.request);
  webhooks.forEach(apply.webhook);
}

// ---- The stream, and requests to the sandbox ----------------------------------------------------

const LIVE = {
  connecting: "Connecting…",
  live: "Live",
  away: "The sandbox does not answer; trying again",
};

function setLive(name) {
  $("live").dataset.state = name;
  if ($("live").textContent !== LIVE[name]) $("live").textContent = LIVE[name];
}

function openStream() {
  const source = new EventSource("/sandbox/stream");
  source.onerror = () => {
    setLive("away");
    // The browser tries again by itself, but not if it was refused.
    if (source.readyState === EventSource.CLOSED) setTimeout(openStream, 2000);
  };
  source.addEventListener("snapshot", ({ data }) => {
    takeSnapshot(JSON.parse(data));
    setLive("live");
    introduce();
    conversation.toEnd();
    show();
  });
  for (const [kind, change] of Object.entries(apply)) {
    source.addEventListener(kind, ({ data }) => {
      const record = JSON.parse(data);
      change(record);
      if (kind === "message") announce(record);
      show();
    });
  }
}

let announcedAt = 0;

/** Tell screen readers of a message, at most once a second. */
function announce({ to, from }) {
  if (Date.now() - announcedAt < 1000) return;
  announcedAt = Date.now();
  $("announce").textContent = `New message for ${to} from ${from ?? "no sender"}`;
}

/** Send a request to the sandbox; throws an error that says why it was refused. */
async function ask(method, path, body) {
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers: body === undefined ? {} : { "Content-Type": "application/json" },
      body: typeof body === "string" || body === undefined ? body : JSON.stringify(body),
    });
  } catch {
    throw new Error("The sandbox does not answer. Is it still running?");
  }
  const document = await answer.json().catch(() => null);
  if (!answer.ok) throw new Error(document?.error ?? `The sandbox answered ${answer.status}.`);
  return document;
}

/** Send an order to the sandbox, and show in `note` why it was refused. */
async function send(path, order, note = $("composer-note")) {
  note.textContent = "";
  note.className = "note";
  try {
    await ask("POST", path, order);
    return true;
  } catch (error) {
    note.textContent = error.message;
    note.classList.add("bad");
    return false;
  }
}

// ---- Wording ------------------------------------------------------------------------------------

const ENCODINGS = { gsm7: "GSM-7", ucs2: "UCS-2" };

function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });

function timeOf(item) {
  const time = new Date(item.received_at ?? item.sent_at);
  const isToday = time.toDateString() === new Date().toDateString();
  return isToday ? clock.format(time) : `${day.format(time)}, ${clock.format(time)}`;
}

function answered(webhook) {
  const { answers, forged, repeat } = webhook;
  if (answers === null) return { tone: "", text: "under way …" };
  if (!answers.length) return { tone: "bad", text: "given up" };
  const statuses = [...new Set(answers)].map((status) => status ?? "nothing").join(" and ");
  const times = repeat > 1 ? `, ${repeat} times` : "";
  const isRight = answers.every((status) => status === (forged ? 401 : 200));
  return { tone: isRight ? "good" : "bad", text: `the bridge answered ${statuses}${times}`, hint: hintFor(webhook) };
}

function hintFor({ answers, forged }) {
  const url = state.about.webhook_url;
  if (forged && answers.includes(200)) return "A forged webhook was accepted: webhook.signature checks nothing.";
  if (answers.includes(null)) return `Nothing answered at ${url}. Is sms-bridge webhook running there?`;
  if (!forged && answers.includes(401)) return "The signature was refused. webhook.secrets and --webhook-secret must be equal.";
  if (answers.includes(404)) return `The bridge has no such path. Compare webhook.path with ${url}.`;
  if (answers.includes(503)) return "The bridge could not publish it. Is RabbitMQ up? A service would try again.";
  const other = answers.find((status) => status >= 300 && !(forged && status === 401));
  return other ? `${other} is not an answer that the bridge gives. Does --webhook-url point to it?` : null;
}

function describeFault({ mode, latency_seconds, headers, answer, status }) {
  const what = {
    hang: "takes the request and hangs",
    cut: "cuts the connection",
    accept_then_cut: "sends the message, then cuts",
  }[mode];
  const after = latency_seconds ? ` after ${latency_seconds} s` : "";
  const more = Object.entries(headers ?? {}).map(([name, value]) => `, ${name}: ${value}`).join("");
  if (what) return `${what}${after}`;
  if (answer) return `answers “${answer}”${after}${more}`;
  return `${status ? `answers ${status}` : "sends the message"}${after}${more}`;
}

function outcomeOf({ status, seconds }) {
  if (status !== null) return { tone: status < 300 ? "good" : "bad", text: String(status) };
  return { tone: "warn", text: seconds === null ? "…" : "cut" };
}

function describeTrouble({ fault, status, seconds }) {
  if (fault === "accept_then_cut") return "was sent, then cut: the bridge cannot know that it was sent";
  if (status !== null) return `was answered ${status}`;
  if (seconds === null) return fault === "hang" ? "hangs …" : "waits …";
  return fault === "hang" ? "was not answered until the bridge gave up" : "was cut without an answer";
}

function previewOf(item) {
  const text = (item.text ?? "").slice(0, 200);
  if (item.kind === "message") return item.from ? `${item.from}: ${text}` : text;
  if (item.kind === "reply") return `Reply: ${text}`;
  if (item.kind === "receipt") return `Receipt: ${item.delivery}`;
  return `A request ${describeTrouble(item)}`;
}

// ---- The list of phones -------------------------------------------------------------------------

function findPhones() {
  const query = state.query.trim().toLowerCase();
  const isFound = ({ number, items }) => !query || number.includes(query)
    || items.some((item) => (item.sought ?? item.text ?? "").toLowerCase().includes(query));
  state.order = [...state.phones.values()].filter(isFound);
  state.order.sort((a, b) => b.items.at(-1).number - a.items.at(-1).number);
}

function drawPhones() {
  findPhones();
  const box = $("phone-list");
  const shown = state.order.slice(0, state.listed.phones);
  reconcile(box, shown, ({ number }) => number, makeRow);
  shown.forEach((phone, index) => drawRow(box.children[index], phone));
  const selected = box.querySelector("[aria-selected=true]");
  if (selected) box.setAttribute("aria-activedescendant", selected.id);
  else box.removeAttribute("aria-activedescendant");
  box.hidden = !shown.length;
  $("more-phones").hidden = state.order.length <= shown.length;
  const query = state.query.trim();
  const asNumber = query.startsWith("+") ? query : `+${query}`;
  $("nothing-found").hidden = Boolean(shown.length) || !query;
  $("nothing-found").textContent = `No number, sender or text contains “${query}”.`;
  $("write-from").hidden = !NUMBER.test(query) || state.phones.has(asNumber);
  $("write-from").textContent = `Write from ${asNumber}`;
  const { length } = state.messages;
  $("totals").textContent = length ? count(length, "message") : "";
  $("forget").hidden = !state.phones.size;
}

function makeRow({ number }) {
  return make("div", { className: "row", id: `phone-${number.slice(1)}`, role: "option", on: { click: () => openPhone(number, { goThere: true }) } },
    ...["who", "when", "what", "badge"].map((className) => make("span", { className })));
}

function drawRow(row, phone) {
  const last = phone.items.at(-1);
  const unread = unreadOf(phone);
  const isOpen = phone.number === state.open;
  const drawn = `${versionOf(last)} ${unread} ${isOpen}`;
  if (row.dataset.drawn === drawn) return;
  row.dataset.drawn = drawn;
  const [who, when, what, badge] = row.children;
  who.textContent = phone.number;
  when.textContent = timeOf(last);
  what.textContent = previewOf(last);
  badge.hidden = !unread;
  badge.replaceChildren(String(unread), make("span", { className: "hidden", text: " unread" }));
  row.classList.toggle("unread", unread > 0);
  row.setAttribute("aria-selected", String(isOpen));
}

function moveSelection(step) {
  findPhones(); // A key may arrive before the frame that draws the result of the last one.
  if (!state.order.length) return;
  const at = state.order.findIndex((phone) => phone.number === state.open);
  const to = Math.max(0, Math.min(state.order.length - 1, at < 0 ? 0 : at + step));
  state.listed.phones = Math.max(state.listed.phones, to + 1);
  openPhone(state.order[to].number);
  document.querySelector(".row[aria-selected=true]").scrollIntoView({ block: "nearest" });
}

// ---- The conversation ---------------------------------------------------------------------------

const conversation = {
  sticks: true, // at the newest message, also when another arrives

  start() {
    const log = $("log");
    log.addEventListener("scroll", () => {
      this.sticks = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
      $("newest").hidden = this.sticks;
      if (this.sticks) markRead();
    }, { passive: true });
    new ResizeObserver(() => { if (this.sticks) this.toEnd(); }).observe(log);
  },

  toEnd() {
    this.sticks = true;
    $("newest").hidden = true;
    $("log").scrollTop = $("log").scrollHeight;
  },

  draw() {
    const log = $("log");
    const items = state.phones.get(state.open)?.items ?? [];
    const ends = () => [$("items").firstElementChild, $("items").lastElementChild];
    const [first, last] = ends();
    const fromEnd = this.sticks ? 0 : log.scrollHeight - log.scrollTop;
    reconcile($("items"), items.slice(-state.listed.items), versionOf, drawItem);
    $("earlier").hidden = items.length <= state.listed.items;
    if (this.sticks) {
      log.scrollTop = log.scrollHeight;
    } else if (last !== ends()[1]) {
      $("newest").hidden = false;
    } else if (first !== ends()[0]) {
      // What was added above leaves the items on the screen where they are.
      log.scrollTop = log.scrollHeight - fromEnd;
    }
  },
};

function drawConversation() {
  const isEmpty = !state.phones.size && !state.open;
  $("panes").classList.toggle("empty", isEmpty && !state.query);
  $("welcome").hidden = !isEmpty || !state.about;
  $("choose").hidden = isEmpty || Boolean(state.open);
  $("phone").hidden = !state.open;
  if (!state.open) return;
  const items = state.phones.get(state.open)?.items ?? [];
  const messages = items.filter((item) => item.kind === "message").length;
  $("phone-title").textContent = state.open;
  $("phone-about").textContent = messages ? count(messages, "message") : "No message yet";
  conversation.draw();
}

function drawItem(item) {
  if (item.kind === "message") return drawMessage(item);
  if (item.kind === "reply") return drawReply(item);
  if (item.kind === "receipt") return drawReceipt(item);
  return drawTrouble(item);
}

function tag(text, tone = "") {
  return make("span", { className: `tag ${tone}`, text });
}

function makeTime(item) {
  return make("time", { text: timeOf(item), dateTime: item.received_at ?? item.sent_at });
}

function drawMessage(message) {
  const { id, to, segments, encoding, repeats, idempotency_key } = message;
  const meta = make("div", { className: "meta" }, makeTime(message),
    make("span", { text: `${count(segments, "segment")} · ${ENCODINGS[encoding]}` }));
  if (repeats) meta.append(tag(idempotency_key ? "again: same key as before" : "again: same words as before", "warn"));
  const { deliveries, webhook_url } = state.about;
  if (deliveries.length && webhook_url) {
    meta.append(make("span", { className: "receipts", role: "group", "aria-label": "Send a receipt" },
      ...deliveries.map((delivery) => make("button", {
        type: "button", className: "quiet", text: delivery, title: `Send the receipt that says ${delivery}`,
        on: { click: () => send("/sandbox/receipts", { id, to, delivery }) },
      }))));
  }
  return make("article", { className: "item" },
    make("div", { className: "sender", text: message.from ?? "no sender", dir: "auto" }),
    make("div", { className: "bubble", text: message.text, dir: "auto" }), meta);
}

function drawReply(reply) {
  const { tone, text, hint } = answered(reply);
  return make("article", { className: "item ours" },
    make("div", { className: `bubble${reply.forged ? " forged" : ""}`, text: reply.text, dir: "auto" }),
    make("div", { className: "meta" }, makeTime(reply), reply.forged ? tag("forged", "warn") : null, tag(text, tone)),
    hint ? make("div", { className: "meta", text: hint }) : null);
}

function drawReceipt(receipt) {
  const { tone, text, hint } = answered(receipt);
  return make("article", { className: "item event" },
    make("span", { text: `${timeOf(receipt)} · receipt “${receipt.delivery}”` }), tag(text, tone),
    hint ? make("span", { text: hint }) : null);
}

function drawTrouble(request) {
  const { tone, text } = outcomeOf(request);
  return make("article", { className: "item event" }, tag(text, tone),
    make("span", { text: `${timeOf(request)} · a request ${describeTrouble(request)}` }),
    make("button", { type: "button", className: "quiet", text: "Show request", on: { click: () => openRequest(request.number) } }));
}

function openPhone(number, { goThere = false } = {}) {
  if (state.open !== number) {
    state.open = number;
    state.listed.items = LISTED;
    $("composer-note").textContent = "";
  }
  if (goThere) {
    $("panes").dataset.view = "conversation";
    if (matchMedia(NARROW).matches) $("back").focus();
  }
  conversation.sticks = true;
  draw();
}

/** Mark the open conversation as read if its newest message is on the screen. */
function markRead() {
  const phone = state.phones.get(state.open);
  if (!phone || !unreadOf(phone) || document.visibilityState !== "visible") return;
  if (!conversation.sticks || $("phone").offsetParent === null) return;
  const seen = { to: phone.number, number: phone.items.at(-1).number };
  apply.read(seen);
  ask("PUT", "/sandbox/read", seen).catch(() => {});
  show();
}

async function sendReply(event) {
  event.preventDefault();
  const text = $("reply").value;
  if (!text.trim() || $("send").disabled) return;
  const kind = $("reply-kind").value;
  $("send").disabled = true;
  conversation.sticks = true;
  const isSent = await send("/sandbox/replies", {
    from: state.open, text, repeat: kind === "repeated" ? 2 : 1, forged: kind === "forged",
  });
  $("send").disabled = false;
  if (isSent) $("reply").value = "";
  $("reply").focus();
}

// ---- The panels: requests, faults, webhooks -----------------------------------------------------

function drawRequests() {
  const isOnly = $("only-this").checked && state.open;
  const fitting = [...state.requests.values()].reverse().filter(({ to }) => !isOnly || to === state.open);
  $("no-requests").hidden = fitting.length > 0;
  $("more-requests").hidden = fitting.length <= state.listed.requests;
  reconcile($("request-list"), fitting.slice(0, state.listed.requests), versionOf, (request) => {
    const { number, to, seconds, detail, idempotency_key } = request;
    const { tone, text } = outcomeOf(request);
    const took = seconds === null ? "" : `${Math.round(seconds * 1000)} ms · `;
    return make("li", {}, make("button", { type: "button", className: "entry", on: { click: () => openRequest(number) } },
      tag(text, tone), make("span", { text: to ?? "no number" }),
      make("span", { className: "when", text: timeOf(request) }),
      make("span", { className: detail ? "sub" : "sub line", text: took + (detail ?? (idempotency_key ? `key ${idempotency_key}` : "no key")) })));
  });
}

async function openRequest(number) {
  openPanel("requests");
  $("request-list-view").hidden = true;
  $("request-view").hidden = false;
  $("copy-curl").hidden = true;
  const box = $("request-detail");
  try {
    const request = await ask("GET", `/sandbox/requests/${number}`);
    state.request = request;
    $("copy-curl").hidden = false;
    const headers = (pairs) => make("dl", {}, ...pairs.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value })]));
    const body = (text, label) => text ? make("pre", { text: pretty(text), tabIndex: 0, "aria-label": label }) : make("p", { className: "muted", text: "No body" });
    box.replaceChildren(make("div", { className: "detail" },
      make("p", { className: "line", text: `${request.method} ${request.path}` }),
      make("p", { className: "muted", text: `${timeOf(request)}${request.detail ? ` · ${request.detail}` : ""}` }),
      headers(request.headers), body(request.body, "Body of the request"),
      make("h3", { text: request.status === null ? `The request ${describeTrouble(request)}` : `Answer ${request.status}` }),
      headers(request.answer_headers), body(request.answer_body, "Body of the answer")));
  } catch (error) {
    box.replaceChildren(make("p", { className: "nothing", text: `${error.message}.` }));
  }
  $("request-back").focus();
}

function closeRequest() {
  $("request-list-view").hidden = false;
  $("request-view").hidden = true;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Quote for a shell: within single quotes nothing has a meaning. */
function quote(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

function asCurl({ method, path, headers, body }) {
  const implied = new Set(["host", "content-length", "connection", "accept", "accept-encoding", "user-agent"]);
  const lines = [`curl -X ${method} ${quote(location.origin + path)}`];
  for (const [name, value] of headers) if (!implied.has(name)) lines.push(`-H ${quote(`${name}: ${value}`)}`);
  if (body) lines.push(`--data-raw ${quote(body)}`);
  return lines.join(" \\\n  ");
}

async function copy(text, button) {
  button.dataset.label ??= button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed here";
  }
  setTimeout(() => { button.textContent = button.dataset.label; }, 1500);
}

function drawFaults() {
  const { faults } = state;
  $("no-faults").hidden = faults.length > 0;
  $("end-faults").hidden = !faults.length;
  const keyed = faults.slice(0, LISTED).map((fault, index) => ({ fault, key: `${index} ${JSON.stringify(fault)}` }));
  reconcile($("fault-list"), keyed, ({ key }) => key, ({ fault }) => make("li", {},
    make("div", { className: "entry" },
      tag(fault.count ? `${fault.count} ×` : "∞", "bad"),
      make("span", { text: describeFault(fault) }),
      make("span", { className: "sub", text: `for ${fault.to ?? "every number"}${fault.count ? "" : ", until it is ended"}` }))));
}

function readFault() {
  const [mode, rest] = $("fault-kind").value.split(/:(.*)/s);
  const fault = { latency_seconds: Number($("fault-latency").value) || 0 };
  const times = $("fault-count-field").value;
  if (times) fault.count = Number(times);
  const to = $("fault-to").value.trim();
  if (to) fault.to = to.startsWith("+") ? to : `+${to}`;
  if (mode === "status") fault.status = Number($("fault-status").value);
  else if (mode === "answer") fault.answer = rest;
  else if (mode !== "slow") fault.mode = mode;
  const after = $("fault-retry-after").value;
  if ((mode === "status" || mode === "answer") && after !== "") fault.headers = { "Retry-After": after };
  return fault;
}

function chooseFault() {
  const [mode, status] = $("fault-kind").value.split(/:(.*)/s);
  $("status-field").hidden = mode !== "status";
  $("retry-after-field").hidden = mode !== "status" && mode !== "answer";
  if (mode === "status" && status) $("fault-status").value = status;
  $("fault-retry-after").value = ["503", "429"].includes(status) ? "2" : "";
  $("fault-latency").value = mode === "slow" ? "5" : "0";
}

async function orderFault(event) {
  event.preventDefault();
  if (await send("/sandbox/faults", readFault(), $("fault-note"))) {
    $("fault-note").textContent = "Added: it applies to the next matching request.";
    $("fault-note").classList.add("good");
  }
}

function drawWebhooks() {
  const newest = [...state.webhooks.values()].slice(-LISTED).reverse();
  $("no-webhooks").hidden = newest.length > 0;
  reconcile($("webhook-list"), newest, versionOf, (webhook) => {
    const { tone, text, hint } = answered(webhook);
    const what = [webhook.forged ? "forged" : "", webhook.kind, webhook.delivery ?? "", webhook.phone ? `of ${webhook.phone}` : ""];
    return make("li", {}, make("div", { className: "entry" },
      tag(webhook.answers?.length ? [...new Set(webhook.answers)].map((status) => status ?? "none").join(" ") : "…", tone),
      make("span", { text: what.filter(Boolean).join(" ") }),
      make("span", { className: "when", text: timeOf(webhook) }),
      make("span", { className: "sub", text: hint ?? text }),
      make("pre", { text: webhook.body, tabIndex: 0, "aria-label": "Body of the webhook" })));
  });
}

async function sendEvent(event) {
  event.preventDefault();
  await send("/sandbox/events", $("event-body").value, $("event-note"));
}

const PANELS = { requests: drawRequests, faults: drawFaults, webhooks: drawWebhooks };
let panel = "requests";

function openPanel(name) {
  panel = name;
  for (const each of document.querySelectorAll("[role=tab]")) {
    const isSelected = each.dataset.panel === name;
    each.setAttribute("aria-selected", String(isSelected));
    each.tabIndex = isSelected ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = !isSelected;
  }
  $("panel").classList.add("open");
  if (name === "requests") closeRequest();
  draw();
}

function closePanel() {
  $("panel").classList.remove("open");
  document.querySelector(`.switch[data-panel="${panel}"]`).focus();
}

// ---- Drawing ------------------------------------------------------------------------------------

let isScheduled = false;

/** Draw in the next frame, once for all changes until then. */
function show() {
  if (isScheduled) return;
  isScheduled = true;
  requestAnimationFrame(draw);
}

function draw() {
  isScheduled = false;
  drawPhones();
  drawConversation();
  PANELS[panel]();
  $("fault-count").hidden = !state.faults.length;
  $("fault-count").textContent = String(state.faults.length);
  let unread = 0;
  for (const phone of state.phones.values()) unread += unreadOf(phone);
  document.title = unread ? `(${unread}) sms-bridge sandbox` : "sms-bridge sandbox";
  markRead();
}

/** Fill in what depends on how the sandbox was started. */
function introduce() {
  const { preset, path, has_key, webhook_url, answers } = state.about;
  const isGeneric = preset === "generic";
  $("preset").textContent = preset;
  $("configure-how").textContent = isGeneric
    ? "In the bridge's config.yaml, or in environment variables:"
    : "Use the settings that the sandbox printed at its start, among them:";
  const lines = ["sms_api:", ...(isGeneric ? [] : [`  preset: ${preset}`]), `  base_url: ${location.origin}`,
    `  key: ${has_key ? "the value of --key" : "any-key"}`];
  if (isGeneric) lines.push("webhook:", `  secrets: [${webhook_url ? "the value of --webhook-secret" : "a-secret"}]`);
  $("configure").textContent = lines.join("\n");
  $("wait-for").textContent = `curl '${location.origin}/sandbox/messages?to=491713920001&wait_seconds=30'`;
  $("no-requests").textContent = `The requests of the bridge's worker, POST ${path}, are listed here with headers, body and answer.`;
  $("own-answers").replaceChildren(...answers.filter(({ fate }) => fate !== "sent").map(({ name, status, code }) => make("option", {
    value: `answer:${name}`, text: `${status}${code ? ` (${code})` : ""}: ${name}`,
  })));
  $("webhook-where").textContent = webhook_url
    ? `They go to ${webhook_url}.`
    : "Webhooks are off. Start the sandbox with --webhook-url http://127.0.0.1:8080/webhooks and --webhook-secret, the one in the bridge's webhook.secrets.";
  for (const id of ["reply", "reply-kind", "send"]) $(id).disabled = !webhook_url;
  for (const field of $("event-form").elements) field.disabled = !webhook_url;
  $("composer-note").textContent = webhook_url ? "" : "To reply, start the sandbox with --webhook-url and --webhook-secret.";
}

// ---- Keys and clicks ----------------------------------------------------------------------------

function onListKey(event) {
  const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
  if (event.key in steps) {
    event.preventDefault();
    moveSelection(steps[event.key]);
  } else if (event.key === "Enter" && state.open) {
    event.preventDefault();
    openPhone(state.open, { goThere: true });
    $("reply").focus();
  }
}

function onKey(event) {
  const isTyping = event.target.closest?.("input, textarea, select");
  if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    $("panes").dataset.view = "phones";
    $("search").focus();
  } else if (event.key === "Escape" && $("panel").classList.contains("open")) {
    closePanel();
  }
}

function onTabKey(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const next = tabs[(tabs.indexOf(event.target) + step + tabs.length) % tabs.length];
  openPanel(next.dataset.panel);
  next.focus();
}

/** Have a button at the end of a list show more of it, also as soon as it is scrolled to. */
function growWith(button, list, redraw) {
  const grow = () => {
    // In longer steps the further one scrolls, so that few frames draw the list anew.
    state.listed[list] += Math.min(state.listed[list], 8 * LISTED);
    redraw();
    // Observed anew, it is told again if the button is still on the screen.
    seen.unobserve(button);
    seen.observe(button);
  };
  const seen = new IntersectionObserver((entries) => { if (entries.at(-1).isIntersecting) grow(); });
  seen.observe(button);
  button.addEventListener("click", grow);
}

function listen() {
  growWith($("more-phones"), "phones", drawPhones);
  growWith($("earlier"), "items", () => conversation.draw());
  growWith($("more-requests"), "requests", drawRequests);
  $("phone-list").addEventListener("keydown", onListKey);
  $("search").addEventListener("input", () => {
    state.query = $("search").value;
    state.listed.phones = LISTED;
    $("phone-scroller").scrollTop = 0;
    show();
  });
  $("search").addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown") return;
    event.preventDefault();
    moveSelection(0);
    $("phone-list").focus();
  });
  $("write-from").addEventListener("click", () => {
    const query = state.query.trim();
    $("search").value = state.query = "";
    openPhone(query.startsWith("+") ? query : `+${query}`, { goThere: true });
    $("reply").focus();
  });
  $("back").addEventListener("click", () => {
    $("panes").dataset.view = "phones";
    $("phone-list").focus();
  });
  $("forget").addEventListener("click", async () => {
    state.open = null;
    $("panes").dataset.view = "phones";
    show();
    for (const kind of ["messages", "requests"]) await ask("DELETE", `/sandbox/${kind}`).catch(() => setLive("away"));
  });
  $("newest").addEventListener("click", () => {
    conversation.toEnd();
    $("log").focus();
  });
  $("composer").addEventListener("submit", sendReply);
  $("reply").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) sendReply(event);
  });
  for (const button of document.querySelectorAll("[data-panel]")) {
    button.addEventListener("click", () => {
      openPanel(button.dataset.panel);
      $(`tab-${button.dataset.panel}`).focus();
    });
  }
  document.querySelector("[role=tablist]").addEventListener("keydown", onTabKey);
  $("close-panel").addEventListener("click", closePanel);
  $("only-this").addEventListener("change", show);
  $("request-back").addEventListener("click", () => {
    closeRequest();
    $("tab-requests").focus();
  });
  $("copy-curl").addEventListener("click", (event) => copy(asCurl(state.request), event.currentTarget));
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", () => copy($(button.dataset.copy).textContent, button));
  }
  $("fault-kind").addEventListener("change", chooseFault);
  $("fault-form").addEventListener("submit", orderFault);
  $("end-faults").addEventListener("click", () => ask("DELETE", "/sandbox/faults").catch(() => {}));
  $("event-form").addEventListener("submit", sendEvent);
  document.addEventListener("keydown", onKey);
  document.addEventListener("visibilitychange", markRead);
}

conversation.start();
listen();
openStream();
