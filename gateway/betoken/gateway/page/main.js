// The chat page: connects the conversation, its panels and the served model.

import { Chat } from "./chat.js";
import { field, make } from "./dom.js";
import { showLanes } from "./lanes.js";
import { placeToken, showNumbers, showPositions, showToken } from "./measures.js";
import { LEGEND } from "./paint.js";
import * as panels from "./panels.js";
import * as settings from "./settings.js";
import { showConversations } from "./sidebar.js";
import { forget, keepSetting, load, setting } from "./store.js";
import { follow } from "./workers.js";

let measured = null;
let chosen = null;

const drawLanes = () => showLanes(field("lanes"), measured ? [measured.answer, measured.other].filter(Boolean) : []);

/** Show the statistics of a turn; null shows none. */
function measure(turn) {
  measured = turn;
  const end = turn?.answer.end ?? null;
  drawLanes();
  showPositions(field("positions"), end);
  showNumbers(field("numbers"), end);
}

/** Enable the buttons of an idle or a busy conversation. */
function showState(isBusy) {
  field("send").disabled = isBusy;
  field("stop").disabled = !isBusy;
  if (isBusy) field("fault").textContent = "";
}

const listConversations = () => showConversations(field("conversations"), chat.conversation.id, { open, remove });

const chat = new Chat(field("turns"), {
  measure,
  choose: (token, span) => {
    chosen = token && span;
    showToken(field("token"), token, span);
  },
  open: (turn) => {
    panels.reveal("measures");
    measure(turn);
  },
  state: showState,
  status: (text) => (field("status").textContent = text),
  fault: (text) => (field("fault").textContent = text),
  lost: (text) => (field("question").value ||= text),
  saved: () => listConversations(),
});

/** Open a stored or a new conversation; an answer that is being received stops and stays in its conversation. */
async function open(id) {
  await chat.stop();
  field("status").textContent = field("fault").textContent = "";
  chat.open(load(id));
  listConversations();
  panels.closeDrawer();
  field("question").focus();
}

async function remove(id) {
  if (id === chat.conversation.id) await open();
  forget(id);
  listConversations();
}

function submit(event) {
  event.preventDefault();
  const question = field("question").value;
  if (chat.running || !question.trim()) return;
  field("question").value = "";
  chat.send(question);
}

function sendByEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!chat.running) field("ask").requestSubmit();
}

function followColours() {
  field("colours").checked = setting("colours", true);
  const show = () => field("turns").classList.toggle("colourless", !field("colours").checked);
  field("colours").addEventListener("change", () => {
    keepSetting("colours", field("colours").checked);
    show();
  });
  show();
}

panels.begin();
panels.beginTheme();
settings.begin();
followColours();
listConversations();
field("ask").addEventListener("submit", submit);
field("question").addEventListener("keydown", sendByEnter);
field("stop").addEventListener("click", () => chat.stop());
field("clear").addEventListener("click", () => open());
field("turns").addEventListener("scroll", () => placeToken(field("token"), chosen));
addEventListener("pagehide", () => chat.running && chat.keep());
new ResizeObserver(drawLanes).observe(field("lanes"));
field("legend").append(...LEGEND.map(([name, text]) => make("li", [make("span", "token", { class: `token from-${name}` }), ` ${text}`])));
follow(field("workers"), settings.key, (model, fault) => {
  field("model").textContent = model ? `${model.id}, context ${model.max_model_len}` : fault;
  if (model) settings.offer(model);
});
