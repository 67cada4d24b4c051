"use strict"
// The page at /: a chat, what the engines do (GET v1/live), and what is served. No text of a model, a user or a server
// ever becomes markup: everything is set as textContent.

const $ = id => document.getElementById(id)
const isTrace = document.documentElement.dataset.mode === "trace"  // served by vllm-lite replay --page
const headers = () => $("key").value ? {Authorization: `Bearer ${$("key").value}`} : {}
const WHOLE = new Intl.NumberFormat("en", {maximumFractionDigits: 0})
const number = value => WHOLE.format(value)

function make(tag, {text, ...properties} = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties)
  if (text !== undefined) node.textContent = text
  node.append(...children)
  return node
}

/** Set a text, unless it is there already: what is set is laid out again. */
function write(node, text) {
  if (node.textContent !== text) node.textContent = text
}

async function said(answer) {
  const text = await answer.text()
  try { return JSON.parse(text).error.message } catch { return `${answer.status} ${text.slice(0, 300)}` }
}

/** The events of a stream, as [kind, data]. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader()
  for (let text = "";;) {
    const {done, value} = await reader.read()
    if (done) return
    const parts = (text += value).split("\n\n")
    text = parts.pop()
    for (const part of parts) {
      const lines = part.split("\n")
      const field = name => lines.find(line => line.startsWith(`${name}: `))?.slice(name.length + 2)
      const data = field("data")
      if (data !== undefined && data !== "[DONE]") yield [field("event") ?? "message", JSON.parse(data)]
    }
  }
}

// ---- tabs

if (isTrace) { $("tab-chat").remove(); $("chat").hidden = true }
const tabs = [...document.querySelectorAll("[role=tab]")]

function open(tab) {
  for (const each of tabs) {
    const chosen = each === tab
    each.setAttribute("aria-selected", chosen)
    each.tabIndex = chosen ? 0 : -1
    $(each.getAttribute("aria-controls")).hidden = !chosen
  }
  if (isTrace) return
  if (tab.id === "tab-model") showSettings()
  if (tab.id === "tab-chat" && cards.length > 1) look()  // states may have changed
  if (tab.id === "tab-live") watch()
  else watching?.abort()
}

for (const tab of tabs) {
  tab.addEventListener("click", () => open(tab))
  tab.addEventListener("keydown", event => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key]
    if (!step) return
    const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length]
    next.focus()
    open(next)
  })
}

// ---- what is served

const PICKED = "vllm_lite model"
let model = "MODEL", context = 0

function remembered(name) {
  try { return JSON.parse(localStorage.getItem(name)) } catch { return null }
}

function remember(name, value) {
  try { localStorage.setItem(name, JSON.stringify(value)) } catch { /* full: it goes on without */ }
}

function list(place, pairs) {
  place.replaceChildren(...pairs.flatMap(([name, value]) => [
    make("dt", {text: name}),
    make("dd", {text: typeof value === "object" ? JSON.stringify(value) : String(value)}),
  ]))
}

/** Ask what is served, and keep the choice among several. */
async function look() {
  try {
    const answer = await fetch("v1/models", {headers: headers()})
    if (answer.ok) offer((await answer.json()).data)
    else write($("served"), await said(answer))
  } catch (error) { write($("served"), `The server does not answer: ${error.message}`) }
}

let cards = []

const stateOf = card => card?.status?.value

/** How the model is computed, and with which flags: for those who may see everybody's requests. Behind a router each
 * model has its own. */
async function showSettings() {
  const asked = model, state = stateOf(cards.find(each => each.id === asked))
  $("run").hidden = true
  if (!cards.length || (state && !["loaded", "sleeping"].includes(state))) return
  const answer = await fetch(`v1/live/settings${state ? `?model=${encodeURIComponent(asked)}` : ""}`, {headers: headers()})
  if (!answer.ok || model !== asked) return
  const {command, computed, kernels} = await answer.json()
  $("run").hidden = false
  list($("computed"), Object.entries({...kernels, ...computed}).filter(([, value]) => value !== null))
  write($("command"), command)
}

function offer(found) {
  cards = found
  const options = cards.map(card => {
    const text = stateOf(card) ? `${card.id} (${stateOf(card)})` : card.id
    return make("option", {value: card.id, text, disabled: stateOf(card) === "failed"})
  })
  $("pick").replaceChildren(...options)
  $("pick").hidden = cards.length < 2
  const usable = cards.filter(card => stateOf(card) !== "failed")
  const kept = remembered(PICKED)
  pick((usable.find(card => card.id === kept) ?? usable.find(card => stateOf(card) === "loaded") ?? usable[0])?.id)
}

function pick(name) {
  const card = cards.find(each => each.id === name)
  $("pick").value = model = name ?? "MODEL"
  context = card?.max_model_len ?? 0
  const room = context ? `with a context of ${number(context)} tokens` : ""
  write($("served"), !card ? "No model is served" : cards.length > 1 ? room : `${model}${room && ", "}${room}`)
  list($("card"), Object.entries(card ?? {}).filter(([, value]) => value !== null))
  const base = new URL(".", location.href).href.replace(/\/$/, "")
  $("curl").textContent = `curl ${base}/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{"model": "${model}", "messages": [{"role": "user", "content": "Hello!"}]}'`
  $("python").textContent = `from openai import OpenAI

client = OpenAI(base_url="${base}/v1", api_key="none")
answer = client.chat.completions.create(model="${model}", messages=[{"role": "user", "content": "Hello!"}])
print(answer.choices[0].message.content)`
}

$("pick").addEventListener("change", () => {
  pick($("pick").value)
  remember(PICKED, model)
  if (!$("model").hidden) showSettings()
})

/** A model that has to be loaded first makes its first answer slow: say so. */
function expectLoad() {
  const card = cards.find(each => each.id === model), state = stateOf(card)
  if (!state || state === "loaded") return
  const usual = card.vllm_lite?.load_s ? `; that took ${card.vllm_lite.load_s.toFixed(1)} s last time` : ""
  write($("gauge"), `${model} is ${state}: it is loaded first${usual}`)
}

for (const place of [$("curl"), $("python"), $("command")]) {
  const button = make("button", {text: "Copy", type: "button"})
  button.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(place.textContent) } catch { getSelection().selectAllChildren(place) }
  })
  place.before(button)
}

// ---- chat

const STORED = "vllm_lite chat"
let messages = remembered(STORED) ?? [], images = [], running = null

const keep = () => remember(STORED, messages)

const textOf = content => typeof content === "string" ? content :
  content.filter(part => part.type === "text").map(part => part.text).join("")

/** A text with its fenced code in boxes of its own. */
function shown(text) {
  const place = make("div", {className: "text"})
  text.split(/^```/m).forEach((part, index) => {
    if (index % 2) place.append(make("pre", {text: part.replace(/^[^\n]*\n/, ""), tabIndex: 0}))
    else if (part) place.append(make("span", {text: part}))
  })
  return place
}

function article(message, index) {
  const node = make("article", {className: message.role})
  if (message.reasoning) node.append(make("details", {}, make("summary", {text: "Reasoning"}), shown(message.reasoning)))
  for (const part of Array.isArray(message.content) ? message.content : [])
    if (part.type === "image_url") node.append(make("img", {src: part.image_url.url, alt: "image that was sent"}))
  if (message.content) node.append(shown(textOf(message.content)))
  for (const call of message.tool_calls ?? [])
    node.append(make("pre", {text: `${call.function.name}(${call.function.arguments})`, tabIndex: 0}))
  if (index !== undefined) {
    const name = message.role === "user" ? "Edit" : "Retry"
    const button = make("button", {text: name, type: "button"})
    button.addEventListener("click", () => message.role === "user" ? edit(index) : retry(index))
    node.append(make("div", {className: "tools"}, button))
  }
  return node
}

function draw() {
  $("messages").replaceChildren(...messages.map(article))
  $("messages").scrollTop = $("messages").scrollHeight
}

function fail(text) {
  $("messages").append(make("article", {className: "error", text}))
  $("messages").scrollTop = $("messages").scrollHeight
}

function edit(index) {
  if (running) return
  putBack(messages[index])
  messages.length = index
  keep()
  draw()
  $("question").focus()
}

/** Put a message where it was written, with its images. */
function putBack({content}) {
  $("question").value = textOf(content)
  images = Array.isArray(content) ? content.filter(part => part.type === "image_url").map(part => part.image_url.url) : []
  drawImages()
}

/** A question that was refused is no part of the chat, or all that come after it would be refused as well. */
function takeBack(question) {
  if (question === undefined || messages.at(-1) !== question) return
  messages.pop()
  const next = $("question").value, others = images  // what is being written already
  putBack(question)
  if (next) $("question").value += `\n${next}`
  images.push(...others)
  drawImages()
  draw()
}

function retry(index) {
  if (running) return
  messages.length = index
  draw()
  answer()
}

function sampling() {
  const given = ["temperature", "top_p", "max_tokens"].filter(name => $(name).value !== "")
  return Object.fromEntries(given.map(name => [name, Number($(name).value)]))
}

const STREAMED = {include_usage: true, continuous_usage_stats: true}

function body() {
  const system = $("system").value ? [{role: "system", content: $("system").value}] : []
  const asked = messages.map(({role, content}) => ({role, content}))
  return {model, messages: [...system, ...asked], stream: true, stream_options: STREAMED, ...sampling()}
}

function merge(message, delta) {
  for (const name of ["content", "reasoning"]) if (delta[name]) message[name] = (message[name] ?? "") + delta[name]
  for (const call of delta.tool_calls ?? []) {
    const calls = message.tool_calls ??= []
    const known = calls[call.index] ??= {function: {name: "", arguments: ""}}
    known.function.name += call.function?.name ?? ""
    known.function.arguments += call.function?.arguments ?? ""
  }
}

async function answer() {
  running = new AbortController()
  $("send").textContent = "Stop"
  expectLoad()
  const message = {role: "assistant", content: ""}, question = messages.at(-1)
  const asked = performance.now()
  let place = null, began = null, usage = null, drawn = false
  const redraw = () => {
    drawn = false
    const next = article(message), thought = next.querySelector("details")
    if (thought) thought.open = place?.querySelector("details")?.open ?? false
    place ? place.replaceWith(next) : $("messages").append(next)
    place = next
    $("messages").scrollTop = $("messages").scrollHeight
    if (usage) measure(usage, asked, began)
  }
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", signal: running.signal, headers: {"Content-Type": "application/json", ...headers()},
      body: JSON.stringify(body()),
    })
    if (!response.ok) throw new Error(await said(response))
    for await (const [, event] of events(response)) {
      if (event.error) throw new Error(event.error.message)
      usage = event.usage ?? usage
      const delta = event.choices?.[0]?.delta
      if (!delta) continue
      began ??= performance.now()
      merge(message, delta)
      if (!drawn) { drawn = true; requestAnimationFrame(redraw) }
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      if (!began) takeBack(question)
      fail(error.message)
    }
  } finally {
    if (message.content || message.tool_calls || message.reasoning) messages.push(message)
    if (usage) measure(usage, asked, began ?? asked)
    if (cards.length > 1) look()  // its state has changed
    running = null
    $("send").textContent = "Send"
    keep()
    if (messages.at(-1) === message) draw()
  }
}

function measure(usage, asked, began) {
  const now = performance.now(), took = now - began > 100 ? now - began : now - asked  // a short answer comes at once
  const speed = usage.completion_tokens / Math.max(0.001, took / 1000)
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0
  const share = context ? ` of ${number(context)} (${Math.round(100 * usage.total_tokens / context)} %)` : ""
  $("gauge").textContent = `context ${number(usage.total_tokens)}${share} · ${number(usage.completion_tokens)} tokens, ` +
    `${number(speed)} a second · ${number(cached)} of ${number(usage.prompt_tokens)} prompt tokens were cached`
}

function ask(text) {
  const parts = images.map(url => ({type: "image_url", image_url: {url}}))
  messages.push({role: "user", content: parts.length ? [...parts, {type: "text", text}] : text})
  images = []
  drawImages()
  keep()
  draw()
  answer()
}

function drawImages() {
  $("images").hidden = !images.length
  $("images").replaceChildren(...images.map((url, index) => {
    const button = make("button", {type: "button", text: "Remove"})
    button.addEventListener("click", () => { images.splice(index, 1); drawImages(); $("question").focus() })
    return make("li", {}, make("img", {src: url, alt: "image to send"}), button)
  }))
}

function take(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue
    const reader = new FileReader()
    reader.addEventListener("load", () => { images.push(reader.result); drawImages() })
    reader.readAsDataURL(file)
  }
}

$("ask").addEventListener("submit", event => {
  event.preventDefault()
  const text = $("question").value.trim()
  if (running) running.abort()
  else if (text) { $("question").value = ""; ask(text) }
})
$("question").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return
  event.preventDefault()
  if (!running) $("ask").requestSubmit()  // who writes the next question meanwhile ends no answer
})
$("new").addEventListener("click", () => {
  running?.abort()
  messages = []
  $("gauge").textContent = ""
  keep()
  draw()
})
$("chat").addEventListener("dragover", event => { event.preventDefault(); $("chat").classList.add("dropping") })
$("chat").addEventListener("dragleave", () => $("chat").classList.remove("dropping"))
$("chat").addEventListener("drop", event => {
  event.preventDefault()
  $("chat").classList.remove("dropping")
  take(event.dataTransfer.files)
})
$("question").addEventListener("paste", event => take(event.clipboardData.files))

// ---- live

const NUM_KEPT = 120, AGAIN_MS = 2000, CACHED = 0x80, NULL_BLOCK = 0
const RANK = ["running", "swapped", "preempted", "waiting"]
let watching = null, engines = new Map(), chosen = null, due = false

async function watch() {
  if (watching) return
  watching = new AbortController()
  const {signal} = watching
  while (!signal.aborted) {
    try {
      const answer = await fetch("v1/live", {headers: headers(), signal})
      if (!answer.ok) throw new Error(await said(answer))
      $("connection").textContent = "live"
      for await (const [kind, data] of events(answer)) absorb(kind, data)
      throw new Error("the server has ended the stream")
    } catch (error) {
      if (signal.aborted) break
      $("connection").textContent = `not connected: ${error.message}; trying again`
    }
    await new Promise(resolve => setTimeout(resolve, AGAIN_MS))
  }
  watching = null
}

/** A snapshot has everything, an update what has changed. One that names a model is about the engines of that alone. */
function absorb(kind, data) {
  if (data.models) absorbModels(kind, data)
  if (kind === "snapshot" && data.engines)
    for (const [name, engine] of engines) {
      if (data.model !== undefined && modelOf(name) !== data.model) continue
      if (name in data.engines) engine.requests.clear()
      else forget(name)
    }
  for (const [name, said] of Object.entries(data.engines ?? {})) {
    if (said === null) { forget(name); continue }
    if (!engines.has(name)) engines.set(name, newEngine(name))
    const engine = engines.get(name), {requests, blocks, ...head} = said
    engine.before = engine.head && {head: engine.head, time: engine.time}
    engine.head = head
    engine.time = data.time
    for (const [key, fields] of Object.entries(requests)) {
      if (fields === null) engine.requests.delete(key)
      else engine.requests.set(key, Object.assign(engine.requests.get(key) ?? {}, fields))
    }
    if (blocks) put(engine, blocks)
    record(engine)
  }
  redraw()
}

function redraw() {
  if (!due) { due = true; requestAnimationFrame(drawEngines) }
}

function forget(name) {
  engines.get(name)?.node.remove()
  engines.delete(name)
}

function put(engine, {first, bytes}) {
  const text = atob(bytes)
  if (engine.blocks.length < first + text.length) {
    const longer = new Uint8Array(first + text.length)
    longer.set(engine.blocks)
    engine.blocks = longer
  }
  for (let index = 0; index < text.length; index++) engine.blocks[first + index] = text.charCodeAt(index)
}

function rate(engine, name) {
  const {head, before} = engine
  if (!before || engine.time <= before.time) return 0
  return Math.max(0, (head.counts[name] - before.head.counts[name]) / (engine.time - before.time))
}

function mean(engine, name) {
  const [total, count] = engine.head.times[name] ?? [0, 0]
  return count ? `${(1000 * total / count).toFixed(1)} ms` : "–"
}

/** The mean of what was measured between the last two looks, in ms; what it was before, if nothing was. */
function recent(engine, name, series) {
  const [total, count] = engine.head.times[name] ?? [0, 0], [before, many] = engine.before?.head.times[name] ?? [0, 0]
  return count > many ? 1000 * (total - before) / (count - many) : engine.series[series].at(-1) ?? 0
}

const SERIES = {
  "tokens/s": engine => rate(engine, "generated_tokens"),
  "first token, ms": engine => recent(engine, "first_token_s", "first token, ms"),
  "waiting": engine => engine.head.counts.num_waiting,
  "KV blocks held": engine => engine.head.counts.num_used_blocks,
}

function record(engine) {
  for (const [name, read] of Object.entries(SERIES)) {
    engine.series[name].push(read(engine))
    if (engine.series[name].length > NUM_KEPT) engine.series[name].shift()
  }
}

function newEngine(name) {
  const parts = {
    title: make("h2"), figures: make("dl", {className: "figures"}),
    step: bar("step", STEP_PARTS), stepText: make("p"), moves: bar("step moves", MOVES), talks: talkTable(),
    tiers: make("p", {className: "block"}), block: make("p", {className: "block"}),
    legend: make("ul", {className: "legend"}, ...NAMES.map(kind => make("li", {className: kind}))), rows: make("tbody"), more: make("p"),
    lines: Object.fromEntries(Object.keys(SERIES).map(each => [each, make("canvas", {width: 160, height: 28})])),
  }
  const head = make("tr", {}, ...COLUMNS.map(([title, kind]) => make("th", {text: title, className: kind ?? "", scope: "col"})))
  const lines = make("dl", {className: "figures"}, ...Object.entries(parts.lines).map(([title, canvas]) => {
    canvas.setAttribute("role", "img")
    canvas.setAttribute("aria-label", `${title} in the last minute`)
    return make("div", {}, make("dt", {text: title}), make("dd", {}, canvas))
  }))
  const scroller = make("div", {className: "rows", tabIndex: 0}, make("table", {}, make("thead", {}, head), parts.rows))
  scroller.setAttribute("role", "region")
  scroller.setAttribute("aria-label", "requests")
  const node = make("section", {className: "engine"}, parts.title, parts.figures, parts.step, parts.moves, parts.stepText, lines,
    parts.legend, parts.tiers, parts.block, scroller, parts.more, parts.talks.node)
  $("engines").append(node)
  const engine = {
    name, node, parts, requests: new Map(), blocks: new Uint8Array(0), head: null, before: null, time: 0, pointed: 0, asking: null,
    kinds: new Uint8Array(0), width: 800, rowOf: new Map(),
    series: Object.fromEntries(Object.keys(SERIES).map(each => [each, []])),
  }
  engine.maps = [newMap(engine, "KV blocks", 120), newMap(engine, "KV blocks on the host", 40)]
  parts.legend.before(engine.maps[0].canvas)
  parts.tiers.before(engine.maps[1].canvas)
  return engine
}

function drawEngines() {
  due = false
  readColours()
  drawModels()
  const shown = [...engines.values()].filter(engine => isShown(engine.name))
  for (const engine of engines.values()) engine.node.hidden = !shown.includes(engine)
  shown.forEach(engine => { engine.width = engine.maps[0].canvas.clientWidth || 800 })  // all read before anything is written
  for (const engine of shown) drawEngine(engine)
}

function drawEngine(engine) {
  const {head, parts} = engine, {counts, step} = head
  write(parts.title, `${titleOf(engine)} · ${head.state}`)
  const hits = counts.prompt_tokens ? `${Math.round(100 * counts.cached_tokens / counts.prompt_tokens)} %` : "–"
  figures(parts.figures, {
    "running": number(counts.num_running), "waiting": number(counts.num_waiting),
    "tokens/s": number(rate(engine, "generated_tokens")), "first token": mean(engine, "first_token_s"),
    "between tokens": mean(engine, "token_gap_s"), "queue": mean(engine, "queue_s"), "prompts cached": hits,
    "preempted": number(counts.preemptions), "swapped": number(counts.swaps),
    "drafts right": counts.draft_tokens ? `${number(counts.accepted_tokens)} of ${number(counts.draft_tokens)}` : "–",
    "blocks copied": number(counts.copied_blocks),
    "on the host": number(counts.num_used_host_blocks), "on disk": number(counts.num_stored_keys),
  })
  drawStep(parts, step)
  drawTalks(parts.talks, head.conversations ?? [], engine.time)
  for (const [name, canvas] of Object.entries(parts.lines)) line(canvas, engine.series[name])
  shade(engine)
  drawMaps(engine)
  drawRows(engine)
}

// ---- the step, the tiers, and what conversations find in the cache

const STEP_PARTS = ["decode", "right", "wrong", "draft", "prefill"], MOVES = ["copied", "out", "in"]

const bar = (name, kinds) => make("div", {className: name}, ...kinds.map(kind => make("div", {className: kind})))

function fillBar(place, values) {
  values.forEach((value, index) => { place.children[index].style.flexGrow = value })
  place.hidden = !values.some(value => value > 0)
}

/** Tokens of the latest step: how many drafts of it are right is not known yet, so they are shared out as the latest
 * results say. */
function drawStep(parts, step) {
  const drafts = step.drafts ?? 0, decode = Math.max(0, step.tokens - step.prefill - drafts)
  const right = step.drafted ? drafts * step.right / step.drafted : 0, unknown = step.drafted ? 0 : drafts
  fillBar(parts.step, [decode, right, drafts - right - unknown, unknown, step.prefill])
  parts.step.hidden = false
  fillBar(parts.moves, [step.copies ?? 0, step.swapped_out ?? 0, step.swapped_in ?? 0])
  const texts = [`${number(step.sequences)} sequences`, `${number(decode)} tokens of outputs`]
  if (drafts) texts.push(`up to ${number(drafts)} drafts`)
  texts.push(`${number(step.prefill)} of prompts`)
  if (step.copies) texts.push(`${number(step.copies)} blocks copied`)
  if (step.swapped_out) texts.push(`${number(step.swapped_out)} blocks to the host`)
  if (step.swapped_in) texts.push(`${number(step.swapped_in)} blocks from the host`)
  const drafted = step.drafted ?
    `; of the latest drafts ${number(step.right)} were accepted, ${number(step.drafted - step.right)} refused` : ""
  write(parts.stepText, `step ${number(step.number)}: ${step.tokens ? texts.join(", ") : "nothing to compute"}${drafted}`)
}

const TALK_COLUMNS = [["conversation, by its latest request"], ["requests", "number"], ["prompt tokens", "number"],
  ["found in the cache", "number"], ["share", "number"], ["seconds ago", "number"]]

function talkTable() {
  const rows = make("tbody"), summary = make("summary")
  const head = make("tr", {}, ...TALK_COLUMNS.map(([title, kind]) => make("th", {text: title, className: kind ?? "", scope: "col"})))
  const node = make("details", {className: "talks rows", hidden: true}, summary, make("table", {}, make("thead", {}, head), rows))
  return {node, summary, rows}
}

function drawTalks(talks, said, now) {
  const sum = name => said.reduce((total, each) => total + each[name], 0)
  const share = (found, prompt) => prompt ? `${Math.round(100 * found / prompt)} %` : "–"
  talks.node.hidden = !said.length
  write(talks.summary, `Prefix hits by conversation: ${number(sum("cached"))} of ${number(sum("prompt"))} prompt tokens ` +
    `were found (${share(sum("cached"), sum("prompt"))}) in the latest ${said.length}`)
  while (talks.rows.childElementCount > said.length) talks.rows.lastChild.remove()
  said.forEach((each, index) => {
    const row = talks.rows.children[index] ?? talks.rows.appendChild(
      make("tr", {}, ...TALK_COLUMNS.map(([, kind]) => make("td", {className: kind ?? ""}))))
    const texts = [each.id, number(each.requests), number(each.prompt), number(each.cached),
      share(each.cached, each.prompt), number(Math.max(0, now - each.at))]
    texts.forEach((text, column) => write(row.children[column], text))
  })
}

function figures(place, values) {
  if (place.childElementCount !== Object.keys(values).length)
    place.replaceChildren(...Object.keys(values).map(name => make("div", {}, make("dt", {text: name}), make("dd"))))
  Object.values(values).forEach((value, index) => { write(place.children[index].lastChild, value) })
}

const NAMES = ["free", "evictable", "held", "shared", "host", "chosen"]
const [FREE, EVICTABLE, HELD, SHARED, HOST, CHOSEN] = NAMES.keys()
let colours = {}, pixels = new Uint32Array(NAMES.length), scheme = ""

/** Read the colours of the style, which change with the scheme, by their names and as pixels. */
function readColours() {
  const style = getComputedStyle(document.documentElement)
  const read = NAMES.map(name => style.getPropertyValue(`--${name}`).trim())
  if (read.join() === scheme) return
  scheme = read.join()
  colours = Object.fromEntries(NAMES.map((name, index) => [name, read[index]]))
  const pen = make("canvas", {width: NAMES.length, height: 1}).getContext("2d")
  read.forEach((colour, index) => { pen.fillStyle = colour; pen.fillRect(index, 0, 1, 1) })
  pixels = new Uint32Array(pen.getImageData(0, 0, NAMES.length, 1).data.buffer)
}

function line(canvas, values) {
  const pen = canvas.getContext("2d"), most = Math.max(1, ...values), step = canvas.width / (NUM_KEPT - 1)
  pen.clearRect(0, 0, canvas.width, canvas.height)
  pen.strokeStyle = colours.held
  pen.beginPath()
  values.forEach((value, index) => pen.lineTo(index * step, canvas.height - 2 - (canvas.height - 4) * value / most))
  pen.stroke()
}

// ---- several models, and several engines

let models = new Map(), limit = 0, watched = null, modelTime = 0

/** The model whose engine has this name, like chat/0; "" where a server has one model. */
const modelOf = name => name.slice(0, Math.max(0, name.lastIndexOf("/")))

const hasEngines = model => model !== undefined && ["loaded", "sleeping"].includes(model.state)

function titleOf({name, head}) {
  const of = modelOf(name), number = of ? name.slice(of.length + 1) : name
  const several = [...engines.keys()].filter(other => modelOf(other) === of).length > 1
  return (of || head.model.replace(/\/$/, "").split("/").at(-1)) + (several ? `, engine ${number}` : "")
}

function absorbModels(kind, data) {
  if (kind === "snapshot") models.clear()
  for (const [name, fields] of Object.entries(data.models)) {
    if (fields === null) models.delete(name)
    else models.set(name, Object.assign(models.get(name) ?? {}, fields))
  }
  for (const name of [...engines.keys()]) if (!hasEngines(models.get(modelOf(name)))) forget(name)
  limit = data.memory_limit_bytes
  modelTime = data.time
  if (!models.has(watched)) watched = ["loaded", "loading"].map(firstIn).find(name => name) ?? null
}

const firstIn = state => [...models].find(([, said]) => said.state === state)?.[0]

/** Of several models the one that is chosen is shown. */
const isShown = name => !models.size || modelOf(name) === watched

const size = bytes => bytes < 2 ** 30 ? `${number(bytes / 2 ** 20)} MiB` : `${(bytes / 2 ** 30).toFixed(1)} GiB`

function ago(seconds) {
  if (seconds < 100) return `${number(Math.max(0, seconds))} s ago`
  return seconds < 6000 ? `${number(seconds / 60)} min ago` : `${number(seconds / 3600)} h ago`
}

const modelRows = new Map()

function drawModels() {
  $("models").hidden = !models.size
  if (!models.size) return
  const held = [...models.values()].reduce((sum, {memory_bytes}) => sum + memory_bytes, 0)
  write($("memory"), `${number(models.size)} models, ${size(held)} of ${size(limit)} of memory`)
  for (const [name, row] of modelRows) if (!models.has(name)) { row.remove(); modelRows.delete(name) }
  for (const [name, said] of models) {
    if (!modelRows.has(name)) modelRows.set(name, newModelRow(name))
    fillModel(modelRows.get(name), name, said)
  }
  write($("hint"), hintOf(watched, models.get(watched)))
}

function hintOf(name, said) {
  if (name === null) return "No model is loaded. A model is loaded when somebody asks it; to watch one loads nothing."
  if (said.hidden) return `${name} does not show what it does: ${said.hidden}`
  return hasEngines(said) ? "" : `${name} is ${said.state}, so it has no requests and no blocks.`
}

function newModelRow(name) {
  const row = make("tr", {}, ...Array.from({length: 7}, () => make("td")))
  const button = make("button", {type: "button", text: name})
  button.addEventListener("click", () => { watched = name; redraw() })
  row.children[0].append(button)
  row.children[6].className = "why"
  for (const index of [2, 3]) row.children[index].className = "number"
  $("models").querySelector("tbody").append(row)
  return row
}

function fillModel(row, name, said) {
  const {counts} = said, of = said.aliases.length ? ` = ${said.aliases.join(", ")}` : ""
  const texts = [null, said.state + (said.pinned ? ", pinned" : ""), size(said.memory_bytes),
    said.waiting ? `${number(said.active)} + ${number(said.waiting)} waiting` : number(said.active),
    `${number(counts.loads + counts.wakes)} in, ${number(counts.sleeps + counts.stops)} out`,
    said.used === null ? "never" : said.active ? "now" : ago(modelTime - said.used), said.error ?? said.hidden ?? ""]
  texts.forEach((text, index) => { if (text !== null) write(row.children[index], text) })
  row.children[0].title = name + of
  row.children[0].firstChild.setAttribute("aria-pressed", name === watched)
  row.classList.toggle("chosen", name === watched)
}

// ---- the map of the pool

const TEXTS = ["free", "free, but cached", "held by one", "held by several", "held on the host", "of the request that is chosen"]

/** Find the kind of each block. A view has a part of the pool only, so tables may know of more that are held. */
function shade(engine) {
  const {blocks} = engine, first = hostStart(engine), held = new Uint16Array(blocks.length)
  for (const {table} of engine.requests.values())
    for (let index = 0; index < table.length; index++) held[table[index]]++
  if (engine.kinds.length !== blocks.length) engine.kinds = new Uint8Array(blocks.length)
  for (let block = 0; block < blocks.length; block++) {
    const count = Math.max(blocks[block] & ~CACHED, held[block])
    engine.kinds[block] = count && block >= first ? HOST : count > 1 ? SHARED : count ? HELD : blocks[block] & CACHED ? EVICTABLE : FREE
  }
}

/** Where the ids of the host's blocks begin, which follow those of the device. */
const hostStart = engine => engine.head.first_host_block ?? engine.blocks.length

/** A map of some blocks, which may be pointed at with a pointer or by the arrow keys. */
function newMap(engine, label, height) {
  const canvas = make("canvas", {className: "map blocks", tabIndex: 0})
  const map = {canvas, label, height, first: 0, end: 0, cell: 1, columns: 1, image: null}
  canvas.setAttribute("role", "img")
  canvas.addEventListener("pointermove", ({offsetX, offsetY}) => {
    const column = Math.floor(offsetX / map.cell)
    if (column < map.columns) point(engine, map, map.first + Math.floor(offsetY / map.cell) * map.columns + column)
  })
  canvas.addEventListener("keydown", event => {
    const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: map.columns, ArrowUp: -map.columns}[event.key]
    if (!step) return
    event.preventDefault()
    point(engine, map, engine.pointed >= map.first && engine.pointed < map.end ? engine.pointed + step : map.first)
  })
  return map
}

function drawMaps(engine) {
  const {maps: [device, host], parts: {legend, tiers}, kinds, head: {counts, disk_bytes}} = engine
  const first = Math.min(hostStart(engine), kinds.length), marked = new Set(engine.requests.get(chosen)?.table)
  const found = drawMap(engine, device, 1, first, marked), there = drawMap(engine, host, first, kinds.length, marked)
  TEXTS.forEach((text, kind) => write(legend.children[kind], kind === CHOSEN ? text : `${text}: ${number(found[kind] + (kind === HOST ? there[kind] : 0))}`))
  legend.children[CHOSEN].hidden = !marked.size
  legend.children[HOST].hidden = !counts.num_host_blocks
  const told = []
  if (counts.num_host_blocks)
    told.push(`on the host: ${number(counts.num_used_host_blocks)} of ${number(counts.num_host_blocks)} blocks held, ${number(there[EVICTABLE])} cached`)
  if (counts.num_stored_keys) told.push(`on disk: ${number(counts.num_stored_keys)} blocks and states${disk_bytes ? `, ${size(disk_bytes)}` : ""}`)
  tiers.hidden = !told.length
  write(tiers, told.join(" · "))
}

/** Draw a square for each block, pixel by pixel: so many rectangles would take ten times as long. */
function drawMap(engine, map, first, end, marked) {
  const {canvas} = map, {kinds, width} = engine, counts = NAMES.map(() => 0), total = Math.max(end - first, 1)
  Object.assign(map, {first, end})
  canvas.hidden = end <= first
  if (canvas.hidden) return counts
  const cell = map.cell = Math.max(2, Math.min(14, Math.floor(Math.sqrt(width * map.height / total))))
  const columns = map.columns = Math.max(1, Math.floor(width / cell)), height = Math.ceil(total / columns) * cell
  if (canvas.width !== width) canvas.width = width
  if (canvas.height !== height) canvas.height = height
  const pen = canvas.getContext("2d")
  if (map.image?.width !== width || map.image.height !== height) map.image = pen.createImageData(width, height)
  const image = new Uint32Array(map.image.data.buffer), size = cell > 3 ? cell - 1 : cell
  image.fill(0)
  for (let block = first; block < end; block++) {
    counts[kinds[block]]++
    const place = Math.floor((block - first) / columns) * cell * width + (block - first) % columns * cell
    image.fill(pixels[marked.has(block) ? CHOSEN : kinds[block]], place, place + size)
  }
  for (let top = 0; top < height; top += cell)
    for (let row = top + 1; row < top + size; row++) image.copyWithin(row * width, top * width, (top + 1) * width)
  pen.putImageData(map.image, 0, 0)
  const label = `${map.label}: ${TEXTS.slice(0, CHOSEN).map((text, kind) => `${text}: ${number(counts[kind])}`).join("; ")}`
  if (canvas.getAttribute("aria-label") !== label) canvas.setAttribute("aria-label", label)
  return counts
}

const HOVER_MS = 120, MAX_OWNERS = 4

/** Say who has a block, and ask for its hash if the pointer stays: no look has hashes, there are too many. */
function point(engine, map, block) {
  if (block < map.first || block >= map.end || block === engine.pointed) return
  engine.pointed = block
  const text = holders(engine, block)
  engine.parts.block.textContent = text
  clearTimeout(engine.asking)
  if (!isTrace) engine.asking = setTimeout(() => tellHash(engine, block, text), HOVER_MS)
}

async function tellHash(engine, block, text) {
  const of = modelOf(engine.name), query = new URLSearchParams({engine: engine.name.slice(of && of.length + 1), ...(of && {model: of})})
  const answer = await fetch(`v1/live/blocks/${block}?${query}`, {headers: headers()}).catch(() => null)
  if (!answer?.ok || engine.pointed !== block) return
  const {hash, tiers} = await answer.json(), here = block >= hostStart(engine) ? "host" : "device"
  const others = tiers.filter(tier => tier !== here).map(tier => tier === "disk" ? "on disk" : `on the ${tier}`)
  if (hash) engine.parts.block.textContent = `${text}; hash ${hash}${others.length ? `, also ${others.join(" and ")}` : ""}`
}

function holders(engine, block) {
  const first = hostStart(engine), name = block < first ? `block ${block}` : `block ${block - first} on the host`
  const byte = engine.blocks[block], size = engine.head.block_size, where = []
  for (const {id, table} of engine.requests.values())
    for (let index = table.indexOf(block); index >= 0; index = table.indexOf(block, index + 1))
      where.push(`tokens ${index * size} to ${(index + 1) * size - 1} of ${id}`)
  const more = where.length - MAX_OWNERS, told = more > 0 ? [...where.slice(0, MAX_OWNERS), `and ${number(more)} more`] : where
  const references = Math.max(byte & ~CACHED, where.length)
  return `${name}: ${references} reference${references === 1 ? "" : "s"}, ` +
    `${byte & CACHED ? "a later prompt can find it" : "no prompt can find it"}${told.length ? "; " : ""}${told.join(", ")}`
}

// ---- requests, and why they wait

const COLUMNS = [["request"], ["state"], ["waits for"], ["prompt", "number"], ["cached", "number"],
  ["output", "number"], ["blocks", "number"], ["table"], ["age", "number"]]

function drawRows(engine) {
  const {rows, more} = engine.parts, focused = document.activeElement
  const sorted = [...engine.requests].sort(([, a], [, b]) =>
    RANK.indexOf(a.state) - RANK.indexOf(b.state) || (a.place ?? 0) - (b.place ?? 0) || a.since - b.since)
  for (const [key, row] of engine.rowOf)
    if (!engine.requests.has(key)) { row.remove(); engine.rowOf.delete(key) }
  let next = rows.firstChild
  for (const [key, request] of sorted) {
    if (!engine.rowOf.has(key)) engine.rowOf.set(key, newRow(engine, key))
    const row = engine.rowOf.get(key)
    if (row === next) next = next.nextSibling
    else rows.insertBefore(row, next)
    fill(engine, row, request)
    row.classList.toggle("chosen", key === chosen)
  }
  if (focused !== document.activeElement && rows.contains(focused)) focused.focus()  // its row has moved
  const hidden = engine.head.num_requests - sorted.length
  write(more, hidden > 0 ? `and ${number(hidden)} more` : sorted.length ? "" : "no request is live")
}

function newRow(engine, key) {
  const row = make("tr", {}, ...COLUMNS.map(([, kind]) => make("td", {className: kind ?? ""})))
  const button = make("button", {type: "button"})
  button.addEventListener("click", () => explain(engine, key))
  row.children[0].append(button)
  row.children[2].className = "why"
  row.children[7].append(make("canvas", {className: "table", width: 256, height: 1}))
  return row
}

function fill(engine, row, request) {
  const seconds = Math.max(0, engine.time - request.since)
  const host = request.host_blocks ? ` + ${number(request.host_blocks)} on the host` : ""
  const texts = [request.id, request.state, reason(request), number(request.prompt), number(request.cached),
    number(request.output), number(request.blocks) + host, null, `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`]
  texts.forEach((text, index) => {
    const place = index ? row.children[index] : row.children[0].firstChild
    if (text !== null) write(place, text)
  })
  drawTable(engine, row.children[7].firstChild, request)
}

function reason(request) {
  if (request.reason === null) return ""
  if (request.reason === "waits_for_turn") return `its turn: ${request.place} before it`
  if (request.reason === "waits_for_blocks") return request.why ?? "KV blocks: too few are free"
  return request.why ?? request.reason
}

/** The logical blocks of a request in their order, in the colours of the physical ones; drawn when they have changed. */
function drawTable(engine, canvas, {table}) {
  const {drawn} = canvas, kinds = new Uint8Array(table.length), first = hostStart(engine)
  let same = drawn?.scheme === scheme && drawn.kinds.length === kinds.length
  for (let index = 0; index < kinds.length; index++) {
    kinds[index] = table[index] === NULL_BLOCK ? FREE : table[index] >= first ? HOST : engine.kinds[table[index]] === SHARED ? SHARED : HELD
    same = same && kinds[index] === drawn.kinds[index]
  }
  if (same) return
  canvas.drawn = {kinds, scheme}
  const pen = canvas.getContext("2d"), line = pen.createImageData(canvas.width, 1)
  const cell = Math.max(1, Math.min(12, Math.floor(canvas.width / Math.max(1, kinds.length))))
  const image = new Uint32Array(line.data.buffer), size = cell > 4 ? cell - 2 : cell
  kinds.forEach((kind, index) => image.fill(pixels[kind], index * cell, index * cell + size))
  pen.putImageData(line, 0, 0)
}

async function explain(engine, key) {
  const request = engine.requests.get(key)
  if (!request) return
  chosen = key
  $("why-title").textContent = `Request ${request.id}`
  $("why-sentence").textContent = request.reason === null ? "It runs." : `It waits: ${reason(request)}.`
  facts(engine, request, {})
  $("why").showModal()
  drawEngine(engine)
  if (isTrace) return tellStory(key)
  const answer = await fetch(`v1/requests/${encodeURIComponent(request.id)}`, {headers: headers()})
  if (!answer.ok || chosen !== key) return
  const state = await answer.json(), why = state.admission?.why
  if (why) $("why-sentence").textContent = `It waits: ${why}.`
  facts(engine, request, state.admission?.blocks ?? {})
}

function facts(engine, request, blocks) {
  list($("why-facts"), [
    ["state", request.state],
    ["prompt", `${number(request.prompt)} tokens, ${number(request.cached)} of them found in the cache`],
    ["computed", `${number(request.computed)} tokens`],
    ["output", `${number(request.output)} tokens, ${request.samples} sample${request.samples > 1 ? "s" : ""}`],
    ["blocks", `${number(request.blocks)} on the device, ${number(request.host_blocks)} on the host`],
    ["table", request.table.map(id => id < hostStart(engine) ? id : `host:${id - hostStart(engine)}`).join(" ") || "empty"],
    ["preempted", `${number(request.preemptions)} times`],
    ...Object.entries(blocks).map(([name, value]) => [`blocks ${name}`, number(value)]),
    ["here since", `${Math.max(0, engine.time - request.since).toFixed(1)} s`],
  ])
}

$("why").addEventListener("close", () => {
  chosen = null
  for (const engine of engines.values()) drawEngine(engine)
})

// ---- a trace

const LOOK_AGAIN_MS = 400, HASH_MS = 300, SECOND = 1, NEAR = 10
let trace = null, shownMoment = 0, wantedMoment = 0, isSeeking = false, playing = null, hashTimer = null

async function fetched(path) {
  const answer = await fetch(path)
  if (!answer.ok) throw new Error(await said(answer))
  return answer.json()
}

/** Learn how far the trace has been read, until all of it is. */
async function followTrace() {
  try {
    trace = await fetched("v1/replay")
  } catch (error) {
    $("connection").textContent = `not connected: ${error.message}; trying again`
    setTimeout(followTrace, AGAIN_MS)
    return
  }
  const {file, moments, is_whole, trouble, began, facts} = trace
  document.title = `vllm_lite · ${file}`
  $("served").textContent = `a trace: ${file}, begun ${clock(began)}`
  $("connection").textContent = (is_whole ? `recorded: ${number(moments)} moments` : `reading the trace: ${number(moments)} moments so far`) +
    (trouble ? `. ${trouble}` : "")
  list($("card"), Object.entries(facts).filter(([, value]) => value !== null))
  $("moment").max = Math.max(1, moments)
  drawOverview()
  if (!is_whole) setTimeout(followTrace, LOOK_AGAIN_MS)
  if (moments && (wantedMoment <= moments || is_whole)) seek(wantedMoment || 1)
}

const clock = seconds => new Date(1000 * seconds).toISOString().replace("T", " ").replace(/\.\d+Z/, " UTC")

/** Go to a moment; of those that are wanted while one is fetched only the last is. */
async function seek(moment) {
  wantedMoment = Math.min(Math.max(1, moment), Math.max(1, trace?.moments ?? 1))
  $("moment").value = wantedMoment
  if (isSeeking || wantedMoment === shownMoment) return
  isSeeking = true
  try {
    while (shownMoment !== wantedMoment) {
      const next = wantedMoment
      const data = await fetched(`v1/replay/moments/${next}`)
      shownMoment = next
      showMoment(data)
    }
  } catch (error) {
    pause()
    $("connection").textContent = `moment ${number(wantedMoment)} cannot be shown: ${error.message}`
    wantedMoment = shownMoment
  } finally {
    isSeeking = false
  }
}

function showMoment(data) {
  absorb("snapshot", data)
  const engine = engines.get("0"), replayed = {series: {}, head: null, before: null, time: 0}
  for (const name of Object.keys(SERIES)) replayed.series[name] = []
  for (const look of data.history) {
    replayed.before = replayed.head && {head: replayed.head, time: replayed.time}
    replayed.head = look
    replayed.time = look.time
    record(replayed)
  }
  engine.series = replayed.series
  const ago = data.history.find(look => look.time >= data.time - SECOND)
  engine.before = {head: ago, time: ago.time}
  const life = data.life > 1 ? ` of life ${data.life}` : "", where = data.is_end ? "the end, behind step" : "step"
  const text = `${where} ${number(data.step)}${life}: ${data.after_s.toFixed(3)} s after the beginning, ${clock(data.time)}`
  $("at").textContent = text
  $("moment").setAttribute("aria-valuetext", text)
  $("connection").setAttribute("aria-live", playing ? "off" : "polite")
  drawOverview()
  hashTimer ??= setTimeout(() => { hashTimer = null; history.replaceState(null, "", `#step=${shownMoment}`) }, HASH_MS)
}

/** Lines of the whole trace, each as high as its largest value, and where we are. */
function drawOverview() {
  const canvas = $("overview"), pen = canvas.getContext("2d"), {overview, moments} = trace, {width, height} = canvas
  readColours()
  pen.clearRect(0, 0, width, height)
  const most = []
  for (const [name, colour] of [["num_used_blocks", "shared"], ["num_waiting", "chosen"], ["num_running", "held"]]) {
    const values = overview[name], largest = Math.max(1, ...values)
    most.push(`${name.slice(4).replace("_", " ")} ${number(largest)}`)
    pen.strokeStyle = colours[colour]
    pen.beginPath()
    values.forEach((value, index) => pen.lineTo(width * (index + .5) / values.length, height - 2 - (height - 4) * value / largest))
    pen.stroke()
  }
  pen.fillStyle = getComputedStyle(canvas).color
  pen.fillRect(width * (shownMoment || 1) / Math.max(1, moments) - 1, 0, 2, height)
  canvas.setAttribute("aria-label", `the whole trace; at most: ${most.join(", ")}`)
}

function play() {
  playing = {since: performance.now(), from: shownMoment >= trace.moments ? 1 : shownMoment}
  $("play").textContent = "Pause"
  requestAnimationFrame(tick)
}

function pause() {
  playing = null
  $("play").textContent = "Play"
}

function tick() {
  if (!playing) return
  const moment = playing.from + Math.floor((performance.now() - playing.since) / 1000 * Number($("speed").value))
  seek(moment)
  if (moment >= trace.moments && trace.is_whole) pause()
  else requestAnimationFrame(tick)
}

function stepBy(count) {
  pause()
  seek(wantedMoment + count)
}

function momentOf(hash) {
  const found = /^#step=(\d{1,9})$/.exec(hash)
  return found ? Number(found[1]) : 1
}

async function tellStory(key) {
  $("why-story").replaceChildren()
  try {
    const {story} = await fetched(`v1/replay/story?request=${encodeURIComponent(key)}`)
    if (chosen !== key) return
    $("why-story").replaceChildren(...story.map(text => make("li", {text})))
  } catch (error) { $("why-story").replaceChildren(make("li", {text: error.message})) }
  $("why-story").hidden = false
}

const KEYS = {ArrowLeft: () => stepBy(-1), ArrowRight: () => stepBy(1), PageUp: () => stepBy(-NEAR), PageDown: () => stepBy(NEAR),
  Home: () => stepBy(-Infinity), End: () => stepBy(Infinity), " ": () => playing ? pause() : play()}

function openTrace() {
  $("player").hidden = false
  $("player").lastElementChild.append(make("ul", {className: "legend"}, ...[["held", "running"], ["chosen", "waiting"],
    ["shared", "KV blocks held"]].map(([className, text]) => make("li", {className, text}))))
  $("access").hidden = true
  $("program").hidden = true
  $("card-title").textContent = "What the trace knows"
  $("tab-model").textContent = "Trace"
  $("player").addEventListener("submit", event => event.preventDefault())
  $("moment").addEventListener("input", () => { pause(); seek(Number($("moment").value)) })
  $("overview").addEventListener("click", event =>
    stepBy(Math.round(event.offsetX / $("overview").clientWidth * trace.moments) - wantedMoment))
  $("earlier").addEventListener("click", () => stepBy(-1))
  $("later").addEventListener("click", () => stepBy(1))
  $("play").addEventListener("click", () => playing ? pause() : play())
  $("speed").addEventListener("change", () => { if (playing) playing = {since: performance.now(), from: shownMoment} })
  addEventListener("hashchange", () => stepBy(momentOf(location.hash) - wantedMoment))
  document.addEventListener("keydown", event => {
    const act = KEYS[event.key], {target} = event
    if (!act || !trace || $("why").open || event.altKey || event.ctrlKey || event.metaKey) return
    if (target.matches("input, select, textarea, [role=tab], .rows, .blocks") || (event.key === " " && target.matches("button, summary"))) return
    event.preventDefault()
    act()
  })
  wantedMoment = momentOf(location.hash)
  open($("tab-live"))
  followTrace()
}

$("access").addEventListener("submit", event => event.preventDefault())
$("key").addEventListener("change", look)
if (isTrace) openTrace()
else { look(); draw() }
