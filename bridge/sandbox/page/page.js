// The page of the sandbox. What others wrote is only ever put in as text, never as markup.
"use strict";

const ROW_PIXELS = 70; // as --row in page.css
const SPARE_ROWS = 6;
const CHUNK_ITEMS = 40;
const ITEM_PIXELS = 86; // a guess, until a chunk has been on the screen
const MAX_MESSAGES = 10_000; // as many as a snapshot holds
const TRIM_MESSAGES = 1_000;
const MAX_REQUESTS = 1_000;
const REQUESTS_AT_ONCE = 60;
const WEBHOOKS_AT_ONCE = 60;
const LONG_TEXT = 2_000;
const NUMBER = /^\+?[1-9][0-9]{3,14}$/;

const $ = (id) => document.getElementById(id);

/** Make an element: text is put in as text, whatever it holds. */
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

/** Have a list show items, with the elements that it has as long as an item's key is the same. */
function reconcile(box, items, keyOf, draw) {
  const left = new Map([...box.children].map((element) => [element.dataset.key, element]));
  items.forEach((item, index) => {
    const key = keyOf(item);
    const element = left.get(key) ?? draw(item);
    left.delete(key);
    element.dataset.key = key;
    if (box.children[index] !== element) box.insertBefore(element, box.children[index] ?? null);
  });
  for (const element of left.values()) element.remove();
}

// ---- What is known ------------------------------------------------------------------------------

const state = {
  run: null,
  at: -1,
  about: {},
  phones: new Map(), // number -> {number, items, unread, last}
  order: [], // the phones that are listed, newest first
  messages: [], // all, oldest first, so that the oldest can be forgotten
  keys: new Map(), // what tells a repeat -> how many
  requests: new Map(), // number -> request, oldest first
  webhooks: new Map(),
  faults: [],
  read: {},
  open: null,
  query: "",
  requestsShown: REQUESTS_AT_ONCE,
  request: null,
};

function phoneOf(number) {
  let phone = state.phones.get(number);
  if (!phone) {
    phone = { number, items: [], byNumber: new Map(), unread: 0 };
    state.phones.set(number, phone);
  }
  return phone;
}

/** Put an item where its number belongs; says whether that is the end. */
function insert(phone, item) {
  const known = phone.byNumber.get(item.number);
  if (known) {
    Object.assign(known, item);
    return { item: known, place: "same" };
  }
  phone.byNumber.set(item.number, item);
  let index = phone.items.length;
  while (index > 0 && phone.items[index - 1].number > item.number) index--;
  phone.items.splice(index, 0, item);
  return { item, place: index === phone.items.length - 1 ? "end" : "between" };
}

function addMessage(message) {
  const phone = phoneOf(message.to);
  const key = message.idempotency_key ?? JSON.stringify([message.to, message.from, message.text]);
  const before = state.keys.get(key) ?? 0;
  state.keys.set(key, before + 1);
  const item = { kind: "message", ...message, key, repeats: before > 0 };
  item.sought = `${message.from ?? ""}\n${message.text}`.toLowerCase();
  state.messages.push(item);
  if (message.number > (state.read[message.to] ?? 0)) phone.unread += 1;
  return { phone, ...insert(phone, item) };
}

function forgetOldest() {
  const touched = new Set();
  for (const item of state.messages.splice(0, TRIM_MESSAGES)) {
    touched.add(item.to);
    const left = state.keys.get(item.key) - 1;
    if (left) state.keys.set(item.key, left);
    else state.keys.delete(item.key);
  }
  const oldest = state.messages[0]?.number ?? Infinity;
  for (const number of touched) {
    const phone = state.phones.get(number);
    for (const item of phone.items) if (item.number < oldest) phone.byNumber.delete(item.number);
    phone.items = phone.items.filter((item) => item.number >= oldest);
    if (!phone.items.length) state.phones.delete(number);
    else countUnread(phone);
  }
  if (touched.has(state.open)) conversation.rebuild();
}

function countUnread(phone) {
  const seen = state.read[phone.number] ?? 0;
  phone.unread = 0;
  for (let index = phone.items.length - 1; index >= 0 && phone.items[index].number > seen; index--) {
    if (phone.items[index].kind === "message") phone.unread += 1;
  }
}

/** A request stands in a conversation when it brought no message, or brought it oddly. */
function isTrouble(request) {
  if (request.fault && request.fault !== "answer") return true;
  if (request.status === null) return Boolean(request.fault);
  return request.status >= 300;
}

const apply = {
  message(message) {
    const { phone, item, place } = addMessage(message);
    conversation.changed(phone, item, place);
    if (state.messages.length > MAX_MESSAGES + TRIM_MESSAGES) forgetOldest();
    if (!phone.announced) {
      phone.announced = true;
      setTimeout(() => { phone.announced = false; }, 1000);
      $("announce").textContent = `New message for ${message.to} from ${message.from ?? "no sender"}`;
    }
  },
  request(request) {
    state.requests.set(request.number, request);
    if (state.requests.size > MAX_REQUESTS) state.requests.delete(state.requests.keys().next().value);
    if (request.to && isTrouble(request)) {
      const phone = phoneOf(request.to);
      const { item, place } = insert(phone, { kind: "request", ...request });
      conversation.changed(phone, item, place);
    }
  },
  webhook(webhook) {
    state.webhooks.set(webhook.number, webhook);
    if (webhook.phone) {
      const phone = phoneOf(webhook.phone);
      const { item, place } = insert(phone, { ...webhook });
      conversation.changed(phone, item, place);
    }
  },
  faults(faults) {
    state.faults = faults;
  },
  read({ to, number }) {
    state.read[to] = Math.max(number, state.read[to] ?? 0);
    const phone = state.phones.get(to);
    if (phone) countUnread(phone);
  },
};

function take(snapshot) {
  Object.assign(state, {
    run: snapshot.run, at: snapshot.at, about: snapshot,
    phones: new Map(), messages: [], keys: new Map(), requests: new Map(), webhooks: new Map(),
    faults: snapshot.faults, read: snapshot.read,
  });
  snapshot.messages.forEach(addMessage);
  for (const request of snapshot.requests) {
    state.requests.set(request.number, request);
    if (request.to && isTrouble(request)) insert(phoneOf(request.to), { kind: "request", ...request });
  }
  for (const webhook of snapshot.webhooks) {
    state.webhooks.set(webhook.number, webhook);
    if (webhook.phone) insert(phoneOf(webhook.phone), { ...webhook });
  }
  snapshot.messages = snapshot.requests = snapshot.webhooks = null;
}

// ---- The stream ---------------------------------------------------------------------------------

const stream = {
  source: null,
  isLoading: false,
  early: [],

  open() {
    this.source = new EventSource("/sandbox/stream");
    this.source.onopen = () => setLive(state.run ? "live" : "connecting");
    this.source.onerror = () => {
      setLive("away");
      // A browser tries again by itself, but not after an answer that is none.
      if (this.source.readyState === EventSource.CLOSED) setTimeout(() => this.open(), 2000);
    };
    this.source.addEventListener("reset", (event) => this.hear(event));
    for (const kind of Object.keys(apply)) {
      this.source.addEventListener(kind, (event) => this.hear(event));
    }
  },

  hear(event) {
    const [run, number] = event.lastEventId.split("-");
    const heard = { run, number: Number(number), kind: event.type, data: JSON.parse(event.data) };
    if (this.isLoading) this.early.push(heard);
    else this.act(heard);
  },

  act({ run, number, kind, data }) {
    if (run === state.run && number <= state.at) return;
    if (kind === "reset" || run !== state.run) {
      this.load();
      return;
    }
    state.at = number;
    apply[kind](data);
    show();
  },

  /** Look anew; what is told meanwhile is taken up after. */
  async load() {
    this.isLoading = true;
    try {
      const answer = await fetch("/sandbox/snapshot");
      if (!answer.ok) throw new Error(answer.status);
      take(await answer.json());
      setLive("live");
    } catch {
      setLive("away");
      setTimeout(() => this.load(), 2000);
      return;
    }
    this.isLoading = false;
    const early = this.early;
    this.early = [];
    conversation.rebuild();
    introduce();
    show();
    for (const heard of early) {
      if (this.isLoading) this.early.push(heard);
      else this.act(heard);
    }
  },
};

const LIVE = {
  connecting: "Connecting…",
  live: "Live",
  away: "The sandbox does not answer; trying again",
};

function setLive(name) {
  $("live").dataset.state = name;
  if ($("live").textContent !== LIVE[name]) $("live").textContent = LIVE[name];
}

/** Ask the sandbox for something; what it refuses is thrown as an error that says why. */
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
  const text = await answer.text();
  let document = null;
  try {
    document = text ? JSON.parse(text) : null;
  } catch {
    // Not JSON: the status has to do.
  }
  if (!answer.ok) throw new Error(document?.error ?? `The sandbox answered ${answer.status}.`);
  return document;
}

// ---- Words --------------------------------------------------------------------------------------

const ENCODINGS = { gsm7: "GSM-7", ucs2: "UCS-2" };

function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });

function timeOf(text) {
  const time = new Date(text);
  const isToday = time.toDateString() === new Date().toDateString();
  return isToday ? clock.format(time) : `${day.format(time)}, ${clock.format(time)}`;
}

function answered(webhook) {
  const { answers, forged, repeat } = webhook;
  if (answers === null) return { tone: "", text: "on its way …" };
  if (!answers.length) return { tone: "bad", text: "given up" };
  const statuses = [...new Set(answers)].map((status) => status ?? "nothing").join(" and ");
  const times = repeat > 1 ? `, ${repeat} times` : "";
  const isRight = answers.every((status) => status === (forged ? 401 : 200));
  return { tone: isRight ? "good" : "bad", text: `the bridge answered ${statuses}${times}`, hint: hintFor(webhook) };
}

function hintFor({ answers, forged }) {
  const url = state.about.webhook_url;
  if (forged && answers.includes(200)) return "A forged webhook was taken: webhook.signature checks nothing.";
  if (answers.includes(null)) return `Nothing answered at ${url}. Is sms-bridge webhook running there?`;
  if (!forged && answers.includes(401)) return "The signature was refused. The bridge's webhook.secrets and --webhook-secret have to be equal.";
  if (answers.includes(404)) return `The bridge has no such path. Compare webhook.path with ${url}.`;
  if (answers.includes(503)) return "The bridge could not publish it. Is RabbitMQ up? A service would try again.";
  const other = answers.find((status) => status >= 300 && !(forged && status === 401));
  return other ? `${other} is not the bridge's answer to a webhook. Does --webhook-url lead to it?` : null;
}

function describeFault(fault) {
  const what = {
    hang: "takes the request and hangs",
    cut: "cuts the connection",
    accept_then_cut: "sends the message, then cuts",
  }[fault.mode];
  const after = fault.latency_seconds ? ` after ${fault.latency_seconds} s` : "";
  const headers = Object.entries(fault.headers ?? {}).map(([name, value]) => `, ${name}: ${value}`).join("");
  if (what) return `${what}${after}`;
  if (fault.answer) return `answers “${fault.answer}”${after}${headers}`;
  if (fault.status) return `answers ${fault.status}${after}${headers}`;
  return `sends the message${after}${headers}`;
}

function outcomeOf(request) {
  if (request.status !== null) return { tone: request.status < 300 ? "good" : "bad", text: String(request.status) };
  if (request.seconds === null) return { tone: "warn", text: "…" };
  return { tone: "warn", text: "cut" };
}

function troubleIn(request) {
  if (request.fault === "accept_then_cut") return "was sent, and the connection cut: the bridge cannot know";
  if (request.status !== null) return `was answered ${request.status}`;
  if (request.seconds === null) return request.fault === "hang" ? "hangs …" : "waits …";
  return request.fault === "hang" ? "was left hanging until the bridge gave up" : "was cut unanswered";
}

// ---- The phones ---------------------------------------------------------------------------------

const list = {
  rows: new Map(),

  sort() {
    const query = state.query.trim().toLowerCase();
    const isFitting = (phone) => !query || phone.number.includes(query)
      || phone.items.some((item) => (item.sought ?? item.text ?? "").toLowerCase().includes(query));
    state.order = [...state.phones.values()].filter((phone) => phone.items.length && isFitting(phone));
    state.order.sort((a, b) => b.items.at(-1).number - a.items.at(-1).number);
  },

  draw() {
    this.sort();
    const box = $("phone-list");
    box.hidden = !state.order.length;
    box.style.height = `${state.order.length * ROW_PIXELS}px`;
    this.drawRows();
    const query = state.query.trim();
    const asNumber = query.startsWith("+") ? query : `+${query}`;
    const isNew = NUMBER.test(query) && !state.phones.has(asNumber);
    $("nothing-found").hidden = Boolean(state.order.length) || (!query && !state.phones.size);
    $("nothing-found").textContent = `No number, sender or text has “${query}” in it.`;
    $("write-from").hidden = !isNew;
    $("write-from").textContent = `Write from ${asNumber}`;
    const { length } = state.messages;
    $("totals").textContent = length ? `${count(length, "message")}` : "";
    $("forget").hidden = !length && !state.phones.size;
  },

  drawRows() {
    const scroller = $("phone-scroller");
    const first = Math.max(0, Math.floor(scroller.scrollTop / ROW_PIXELS) - SPARE_ROWS);
    const seen = Math.ceil(scroller.clientHeight / ROW_PIXELS) + 2 * SPARE_ROWS;
    const shown = state.order.slice(first, first + seen);
    const wanted = new Set(shown.map((phone) => phone.number));
    for (const [number, row] of this.rows) {
      if (!wanted.has(number)) {
        row.remove();
        this.rows.delete(number);
      }
    }
    shown.forEach((phone, index) => this.drawRow(phone, first + index));
    const selected = this.rows.get(state.open);
    if (selected) $("phone-list").setAttribute("aria-activedescendant", selected.id);
    else $("phone-list").removeAttribute("aria-activedescendant");
  },

  drawRow(phone, place) {
    let row = this.rows.get(phone.number);
    if (!row) {
      const part = (name) => make("span", { className: name });
      row = make("div", { className: "row", id: `phone-${phone.number.slice(1)}`, role: "option" },
        part("who"), part("when"), part("what"), part("badge"));
      row.addEventListener("click", () => openPhone(phone.number, { goThere: true }));
      this.rows.set(phone.number, row);
      $("phone-list").append(row);
    }
    const last = phone.items.at(-1);
    const [who, when, what, badge] = row.children;
    const put = (element, text) => { if (element.textContent !== text) element.textContent = text; };
    put(who, phone.number);
    put(when, timeOf(last.received_at ?? last.sent_at));
    put(what, previewOf(last));
    badge.hidden = !phone.unread;
    if (badge.dataset.count !== String(phone.unread)) {
      badge.dataset.count = phone.unread;
      badge.replaceChildren(String(phone.unread), make("span", { className: "hidden", text: " unread" }));
    }
    row.classList.toggle("unread", phone.unread > 0);
    row.setAttribute("aria-selected", String(phone.number === state.open));
    row.setAttribute("aria-posinset", place + 1);
    row.setAttribute("aria-setsize", state.order.length);
    row.style.transform = `translateY(${place * ROW_PIXELS}px)`;
  },

  move(step) {
    this.sort(); // A key may come before the frame that draws what was typed before it.
    if (!state.order.length) return;
    const at = state.order.findIndex((phone) => phone.number === state.open);
    const to = Math.max(0, Math.min(state.order.length - 1, at < 0 ? 0 : at + step));
    const scroller = $("phone-scroller");
    const top = to * ROW_PIXELS;
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    if (top + ROW_PIXELS > scroller.scrollTop + scroller.clientHeight) {
      scroller.scrollTop = top + ROW_PIXELS - scroller.clientHeight;
    }
    openPhone(state.order[to].number);
  },
};

function previewOf(item) {
  const text = (item.text ?? "").slice(0, 200);
  if (item.kind === "message") return item.from ? `${item.from}: ${text}` : text;
  if (item.kind === "reply") return `Reply: ${text}`;
  if (item.kind === "receipt") return `Receipt: ${item.delivery}`;
  return `A request ${troubleIn(item)}`;
}

// ---- The conversation ---------------------------------------------------------------------------

/** Items stand in chunks; only those near the screen hold elements, the others their height. */
const conversation = {
  chunks: [],
  sticks: true,
  near: null,

  start() {
    const log = $("log");
    this.near = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        const chunk = this.chunks[Number(target.dataset.index)];
        if (chunk?.element !== target) continue;
        if (isIntersecting) this.fill(chunk);
        else this.empty(chunk);
      }
      if (this.sticks) this.toEnd();
    }, { root: log, rootMargin: "1200px 0px" });
    log.addEventListener("scroll", () => {
      this.sticks = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
      $("newest").hidden = this.sticks;
      if (this.sticks) markRead();
    }, { passive: true });
    new ResizeObserver(() => { if (this.sticks) this.toEnd(); }).observe(log);
  },

  toEnd() {
    $("log").scrollTop = $("log").scrollHeight;
  },

  rebuild() {
    const phone = state.phones.get(state.open);
    const log = $("log");
    this.near.disconnect();
    this.chunks = [];
    log.replaceChildren();
    this.sticks = true;
    $("newest").hidden = true;
    if (!phone) return;
    for (let start = 0; start < phone.items.length; start += CHUNK_ITEMS) {
      this.addChunk(phone.items.slice(start, start + CHUNK_ITEMS));
    }
    if (this.chunks.length) this.fill(this.chunks.at(-1));
    this.toEnd();
  },

  addChunk(items) {
    const element = make("div", { className: "chunk" });
    element.dataset.index = this.chunks.length;
    element.style.height = `${items.length * ITEM_PIXELS}px`;
    const chunk = { element, items, filled: null };
    this.chunks.push(chunk);
    $("log").append(element);
    this.near.observe(element);
    return chunk;
  },

  fill(chunk) {
    if (chunk.filled) return;
    chunk.filled = new Map(chunk.items.map((item) => [item.number, drawItem(item)]));
    chunk.element.replaceChildren(...chunk.filled.values());
    chunk.element.style.height = "";
  },

  empty(chunk) {
    if (!chunk.filled || chunk === this.chunks.at(-1)) return;
    if (chunk.element.contains(document.activeElement)) return;
    chunk.element.style.height = `${chunk.element.offsetHeight}px`;
    chunk.element.replaceChildren();
    chunk.filled = null;
  },

  changed(phone, item, place) {
    if (phone.number !== state.open) return;
    if (place === "between") {
      this.rebuild();
    } else if (place === "same") {
      const chunk = this.chunks.find(({ filled }) => filled?.has(item.number));
      if (!chunk) return;
      const drawn = drawItem(item);
      chunk.filled.get(item.number).replaceWith(drawn);
      chunk.filled.set(item.number, drawn);
    } else {
      let chunk = this.chunks.at(-1);
      if (!chunk || chunk.items.length >= CHUNK_ITEMS) {
        chunk = this.addChunk([]);
        this.fill(chunk);
      }
      const drawn = drawItem(item);
      chunk.items.push(item);
      this.fill(chunk);
      chunk.filled.set(item.number, drawn);
      chunk.element.append(drawn);
    }
    if (this.sticks) this.toEnd();
    else $("newest").hidden = false;
  },
};

function drawItem(item) {
  if (item.kind === "message") return drawMessage(item);
  if (item.kind === "reply") return drawReply(item);
  if (item.kind === "receipt") return drawReceipt(item);
  return drawTrouble(item);
}

function tag(text, tone = "") {
  return make("span", { className: `tag ${tone}`, text });
}

function drawText(text, className) {
  const bubble = make("div", { className, text: text.slice(0, LONG_TEXT), dir: "auto" });
  if (text.length <= LONG_TEXT) return [bubble];
  const all = make("button", { type: "button", className: "quiet", text: `Show all ${count(text.length, "character")}` });
  all.addEventListener("click", () => {
    bubble.textContent = text;
    all.remove();
  });
  return [bubble, all];
}

function drawMessage(message) {
  const meta = make("div", { className: "meta" },
    make("time", { text: timeOf(message.received_at), dateTime: message.received_at }),
    make("span", { text: `${count(message.segments, "segment")} · ${ENCODINGS[message.encoding]}` }));
  if (message.repeats) meta.append(tag(message.idempotency_key ? "again: same key as before" : "again: same words as before", "warn"));
  const deliveries = state.about.deliveries;
  if (deliveries.length && state.about.webhook_url) {
    meta.append(make("span", { className: "receipts", role: "group", "aria-label": "Send a receipt" },
      ...deliveries.map((delivery) => make("button", {
        type: "button", className: "quiet", text: delivery, title: `Send the receipt that says ${delivery}`,
        on: { click: () => send("/sandbox/receipts", { id: message.id, to: message.to, delivery }) },
      }))));
  }
  return make("article", { className: "item" },
    make("div", { className: "sender", text: message.from ?? "no sender", dir: "auto" }),
    ...drawText(message.text, "bubble"), meta);
}

function drawReply(reply) {
  const { tone, text, hint } = answered(reply);
  return make("article", { className: "item ours" },
    ...drawText(reply.text, `bubble${reply.forged ? " forged" : ""}`),
    make("div", { className: "meta" },
      make("time", { text: timeOf(reply.sent_at), dateTime: reply.sent_at }),
      reply.forged ? tag("forged", "warn") : null,
      tag(text, tone)),
    hint ? make("div", { className: "meta", text: hint }) : null);
}

function drawReceipt(receipt) {
  const { tone, text, hint } = answered(receipt);
  return make("article", { className: "item event" },
    make("span", { text: `${timeOf(receipt.sent_at)} · receipt “${receipt.delivery}”` }), tag(text, tone),
    hint ? make("span", { text: hint }) : null);
}

function drawTrouble(request) {
  return make("article", { className: "item event" },
    tag(outcomeOf(request).text, outcomeOf(request).tone),
    make("span", { text: `${timeOf(request.received_at)} · a request ${troubleIn(request)}` }),
    make("button", { type: "button", className: "quiet", text: "Look at it", on: { click: () => openRequest(request.number) } }));
}

function openPhone(number, { goThere = false } = {}) {
  if (state.open !== number) {
    state.open = number;
    $("fault-to").placeholder = "every number";
    history.replaceState(null, "", number ? `#${number}` : location.pathname);
    $("composer-note").textContent = "";
    conversation.rebuild();
  }
  if (goThere) {
    $("panes").dataset.view = "conversation";
    if (matchMedia("(max-width: 760px)").matches) $("back").focus();
  }
  // Measured once it can be seen.
  show.now();
  conversation.toEnd();
  markRead();
}

function markRead() {
  const phone = state.phones.get(state.open);
  if (!phone?.unread || document.visibilityState !== "visible" || $("phone").hidden) return;
  if (!conversation.sticks || $("conversation").offsetParent === null) return;
  const number = phone.items.at(-1).number;
  apply.read({ to: phone.number, number });
  ask("PUT", "/sandbox/read", { to: phone.number, number }).catch(() => {});
  show();
}

function drawConversation() {
  const isEmpty = !state.phones.size && !state.open;
  const phone = state.phones.get(state.open);
  $("panes").classList.toggle("empty", isEmpty && !state.query);
  $("welcome").hidden = !isEmpty || !state.run;
  $("choose").hidden = isEmpty || Boolean(state.open);
  $("phone").hidden = !state.open;
  if (!state.open) return;
  $("phone-title").textContent = state.open;
  const messages = phone?.items.filter((item) => item.kind === "message").length ?? 0;
  $("phone-about").textContent = messages ? count(messages, "message") : "No message yet";
}

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

// ---- Requests, faults, webhooks -----------------------------------------------------------------

function drawRequests() {
  const isOnly = $("only-this").checked && state.open;
  const fitting = [...state.requests.values()].reverse().filter((one) => !isOnly || one.to === state.open);
  $("no-requests").hidden = fitting.length > 0;
  $("more-requests").hidden = fitting.length <= state.requestsShown;
  const keyOf = ({ number, status, seconds }) => `${number} ${status} ${seconds}`;
  reconcile($("request-list"), fitting.slice(0, state.requestsShown), keyOf, (request) => {
    const { tone, text } = outcomeOf(request);
    const took = request.seconds === null ? "" : `${Math.round(request.seconds * 1000)} ms · `;
    return make("li", {}, make("button", { type: "button", className: "entry", on: { click: () => openRequest(request.number) } },
      tag(text, tone), make("span", { text: request.to ?? "no number" }),
      make("span", { className: "when", text: timeOf(request.received_at) }),
      make("span", { className: request.detail ? "sub" : "sub line", text: took + (request.detail ?? (request.idempotency_key ? `key ${request.idempotency_key}` : "no key")) })));
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
      make("p", { className: "muted", text: `${timeOf(request.received_at)}${request.detail ? ` · ${request.detail}` : ""}` }),
      headers(request.headers), body(request.body, "Body of the request"),
      make("h3", { text: request.status === null ? `The request ${troubleIn(request)}` : `Answer ${request.status}` }),
      headers(request.answer_headers), body(request.answer_body, "Body of the answer")));
  } catch (error) {
    box.replaceChildren(make("p", { className: "nothing", text: `${error.message}.` }));
  }
  $("request-back").focus();
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Quote for a shell: nothing in single quotes means anything. */
function quote(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

function asCurl({ method, path, headers, body }) {
  const left = new Set(["host", "content-length", "connection", "accept", "accept-encoding", "user-agent"]);
  const lines = [`curl -X ${method} ${quote(location.origin + path)}`];
  for (const [name, value] of headers) if (!left.has(name)) lines.push(`-H ${quote(`${name}: ${value}`)}`);
  if (body) lines.push(`--data-raw ${quote(body)}`);
  return lines.join(" \\\n  ");
}

async function copy(text, button) {
  const before = button.dataset.label ?? button.textContent;
  button.dataset.label = before;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed here";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

function drawFaults() {
  const faults = state.faults;
  $("fault-count").hidden = $("no-faults").hidden = !faults.length;
  $("no-faults").hidden = faults.length > 0;
  $("fault-count").textContent = String(faults.length);
  $("end-faults").hidden = !faults.length;
  const keyed = faults.slice(0, REQUESTS_AT_ONCE).map((fault, index) => ({ fault, key: `${index} ${JSON.stringify(fault)}` }));
  reconcile($("fault-list"), keyed, ({ key }) => key, ({ fault }) => make("li", {},
    make("div", { className: "entry" },
      tag(fault.count ? `${fault.count} ×` : "∞", "bad"),
      make("span", { text: describeFault(fault) }),
      make("span", { className: "sub", text: `for ${fault.to ?? "every number"}${fault.count ? "" : ", until it is ended"}` }))));
}

function readFault() {
  const kind = $("fault-kind").value;
  const [mode, rest] = kind.split(/:(.*)/s);
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
  const isAnswer = mode === "status" || mode === "answer";
  $("status-field").hidden = mode !== "status";
  $("retry-after-field").hidden = !isAnswer;
  if (mode === "status" && status) $("fault-status").value = status;
  $("fault-retry-after").value = ["503", "429"].includes(status) ? "2" : "";
  $("fault-latency").value = mode === "slow" ? "5" : "0";
}

async function orderFault(event) {
  event.preventDefault();
  if (await send("/sandbox/faults", readFault(), $("fault-note"))) {
    $("fault-note").textContent = "Ordered: it is done to the next request that fits.";
    $("fault-note").classList.add("good");
  }
}

function drawWebhooks() {
  const newest = [...state.webhooks.values()].slice(-WEBHOOKS_AT_ONCE).reverse();
  $("no-webhooks").hidden = newest.length > 0;
  const keyOf = ({ number, answers }) => `${number} ${answers}`;
  reconcile($("webhook-list"), newest, keyOf, (webhook) => {
    const { tone, text, hint } = answered(webhook);
    const what = [webhook.forged ? "forged" : "", webhook.kind, webhook.delivery ?? "", webhook.phone ? `of ${webhook.phone}` : ""];
    return make("li", {}, make("div", { className: "entry" },
      tag(webhook.answers?.length ? [...new Set(webhook.answers)].map((one) => one ?? "none").join(" ") : "…", tone),
      make("span", { text: what.filter(Boolean).join(" ") }),
      make("span", { className: "when", text: timeOf(webhook.sent_at) }),
      make("span", { className: "sub", text: hint ?? text }),
      make("pre", { text: webhook.body, tabIndex: 0, "aria-label": "Body of the webhook" })));
  });
}

async function sendEvent(event) {
  event.preventDefault();
  await send("/sandbox/events", $("event-body").value, $("event-note"));
}

let panel = "requests";

function openPanel(name) {
  panel = name;
  for (const each of document.querySelectorAll("[role=tab]")) {
    const isIt = each.dataset.panel === name;
    each.setAttribute("aria-selected", String(isIt));
    each.tabIndex = isIt ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = !isIt;
  }
  $("panel").classList.add("open");
  if (name === "requests") closeRequest();
  show.now();
}

function closePanel() {
  $("panel").classList.remove("open");
  document.querySelector(`.switch[data-panel="${panel}"]`).focus();
}

function closeRequest() {
  $("request-list-view").hidden = false;
  $("request-view").hidden = true;
}

const PANELS = { requests: drawRequests, faults: drawFaults, webhooks: drawWebhooks };

// ---- Drawing, once for all that came since the last frame ---------------------------------------

let isAwaited = false;

function show() {
  if (isAwaited) return;
  isAwaited = true;
  requestAnimationFrame(show.now);
}

show.now = () => {
  isAwaited = false;
  list.draw();
  drawConversation();
  if ($("panel").offsetParent !== null || $("panel").classList.contains("open")) PANELS[panel]();
  $("fault-count").hidden = !state.faults.length;
  $("fault-count").textContent = String(state.faults.length);
  let unread = 0;
  for (const phone of state.phones.values()) unread += phone.unread;
  document.title = unread ? `(${unread}) sms-bridge sandbox` : "sms-bridge sandbox";
  markRead();
};

/** Say what depends on how the sandbox was started. */
function introduce() {
  const { preset, path, has_key, webhook_url, answers } = state.about;
  $("preset").textContent = preset;
  const isGeneric = preset === "generic";
  $("configure-how").textContent = isGeneric
    ? "In the bridge's config.yaml; every setting may be an environment variable, too:"
    : "Take the settings that the sandbox printed at its start. They say, among others:";
  const lines = ["sms_api:", ...(isGeneric ? [] : [`  preset: ${preset}`]), `  base_url: ${location.origin}`,
    `  key: ${has_key ? "what --key says" : "any-key"}`];
  if (isGeneric) lines.push("webhook:", `  secrets: [${webhook_url ? "what --webhook-secret says" : "a-secret"}]`);
  $("configure").textContent = lines.join("\n");
  $("wait-for").textContent = `curl '${location.origin}/sandbox/messages?to=491713920001&wait_seconds=30'`;
  $("no-requests").textContent = `What the bridge's worker sends to POST ${path} is listed here, with headers, body and answer.`;
  $("own-answers").replaceChildren(...answers.filter((one) => one.fate !== "sent").map((one) => make("option", {
    value: `answer:${one.name}`, text: `${one.status}${one.code ? ` (${one.code})` : ""}: ${one.name}`,
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
    list.move(steps[event.key]);
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

function listen() {
  $("phone-scroller").addEventListener("scroll", () => list.drawRows(), { passive: true });
  new ResizeObserver(() => list.drawRows()).observe($("phone-scroller"));
  $("phone-list").addEventListener("keydown", onListKey);
  $("search").addEventListener("input", () => {
    state.query = $("search").value;
    $("phone-scroller").scrollTop = 0;
    show();
  });
  $("search").addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") {
      event.preventDefault();
      list.move(0);
      $("phone-list").focus();
    }
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
    history.replaceState(null, "", location.pathname);
    $("panes").dataset.view = "phones";
    show();
    for (const kind of ["messages", "requests"]) await ask("DELETE", `/sandbox/${kind}`).catch(() => setLive("away"));
  });
  $("newest").addEventListener("click", () => {
    conversation.sticks = true;
    conversation.toEnd();
    $("log").focus();
  });
  $("composer").addEventListener("submit", sendReply);
  $("reply").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) sendReply(event);
  });
  for (const button of document.querySelectorAll("[data-panel]")) {
    button.addEventListener("click", () => openPanel(button.dataset.panel));
  }
  for (const button of document.querySelectorAll(".switch")) {
    button.addEventListener("click", () => $(`tab-${button.dataset.panel}`).focus());
  }
  document.querySelector("[role=tablist]").addEventListener("keydown", onTabKey);
  $("close-panel").addEventListener("click", closePanel);
  $("only-this").addEventListener("change", show);
  $("more-requests").addEventListener("click", () => {
    state.requestsShown += REQUESTS_AT_ONCE;
    show();
  });
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
  $("fault-to").addEventListener("focus", () => {
    const numbers = [state.open, ...state.order.slice(0, 20).map((phone) => phone.number)];
    $("fault-numbers").replaceChildren(...[...new Set(numbers)].filter(Boolean).map((number) => make("option", { value: number })));
  });
  $("end-faults").addEventListener("click", () => ask("DELETE", "/sandbox/faults").catch(() => {}));
  $("event-form").addEventListener("submit", sendEvent);
  document.addEventListener("keydown", onKey);
  document.addEventListener("visibilitychange", markRead);
  window.addEventListener("hashchange", openFromAddress);
}

function openFromAddress() {
  const number = decodeURIComponent(location.hash.slice(1));
  if (NUMBER.test(number) && number.startsWith("+")) openPhone(number, { goThere: true });
}

conversation.start();
listen();
openFromAddress();
stream.open();
