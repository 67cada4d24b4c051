// Stream a completion from Node.js: node raw_client.mjs ADDRESS [--keys FOLDER] [--max-tokens N] TOKEN_ID...
//
// An example to copy: `npm install` beside it fetches ZeroMQ and msgpack; docs/protocol.md has all the rest. Prints the
// token ids as they come. If the engine dies, the stream goes on in the one that takes its place. For a tcp address --keys
// is the folder that `vllm-lite keys` made for this client.

import { randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

const VERSION = 28;
// How long an engine may load; and be silent later, when it owes an answer and says every half second that it lives.
const LOAD_MS = 60_000, SILENCE_MS = 30_000, NUDGE_MS = 1_000;
const HELLO = ["hello", VERSION, null], PING = ["ping"];

const USAGE = "usage: node raw_client.mjs ADDRESS [--keys FOLDER] [--max-tokens N] TOKEN_ID...";

class Failure extends Error {}
// The engine is gone, and another one may take its place at the same address.
class Lost extends Failure {}
class Dying extends Lost {} // it said so, and that another engine will take its place

function connect(address, keys) {
  const socket = new Dealer({ linger: 500, heartbeatInterval: 5_000, heartbeatTimeout: 30_000 });
  socket.reconnectInterval = 20; // ZeroMQ tries again and again, for as long as nobody listens
  socket.reconnectMaxInterval = 500;
  try {
    if (keys !== undefined) {
      const own = readFileSync(`${keys}/client.key_secret`, "utf8");
      socket.curvePublicKey = key("public", own);
      socket.curveSecretKey = key("secret", own);
      socket.curveServerKey = key("public", readFileSync(`${keys}/server.key`, "utf8"));
    }
    socket.connect(address);
  } catch (error) {
    socket.close();
    throw new Failure(`cannot connect to ${address}, which must be ipc://PATH or tcp://HOST:PORT: ${error.message}`);
  }
  return socket;
}

function key(kind, text) {
  const match = text.match(new RegExp(`^\\s*${kind}-key = "(.{40})"`, "m"));
  if (match === null) throw new Failure(`a file of --keys has no ${kind}-key`);
  return match[1];
}

// Tag and fields, in their order.
const send = (socket, ...message) => socket.send(encode(message));

// The next message. In every second without one `nudge` is sent: an engine that has taken the place of the other one, to
// which ZeroMQ has connected by itself, refuses what comes before Hello.
async function receive(socket, timeoutMs, nudge) {
  socket.receiveTimeout = NUDGE_MS;
  for (let waited = 0; waited < timeoutMs; waited += NUDGE_MS) {
    let frame;
    try {
      [frame] = await socket.receive();
    } catch (error) {
      if (error.code !== "EAGAIN") throw error;
      await send(socket, ...nudge);
      continue;
    }
    let message;
    try {
      message = decode(frame, { useBigInt64: true }); // epochs may be larger than a double holds exactly
    } catch {
      message = null;
    }
    if (!Array.isArray(message)) throw new Failure("what answers there is no engine; is the address right?");
    const [tag, reason, isFinal] = message;
    if (tag === "dying" && isFinal === false) throw new Dying(reason);
    if (tag === "refused" && reason === "say Hello first") throw new Lost(reason);
    if (tag === "refused" || tag === "dying") throw new Failure(`${tag}: ${reason}`);
    return message;
  }
  throw new Lost(`nothing came within ${timeoutMs / 1000} s; is the address right, are the keys?`);
}

// Shake hands with the engine that is at the address, or will be.
async function reach(address, keys) {
  for (;;) {
    const socket = connect(address, keys);
    await send(socket, ...HELLO);
    try {
      await receive(socket, LOAD_MS, HELLO);
      return socket;
    } catch (error) { // it may die even as it starts
      socket.close();
      if (!(error instanceof Dying)) throw error;
    }
  }
}

function packed(tokenIds) {
  const bytes = Buffer.alloc(4 * tokenIds.length);
  tokenIds.forEach((token, place) => bytes.writeUInt32LE(token, 4 * place));
  return bytes;
}

// Yields arrays of token ids as they come. Ends with the request, not with the engine.
async function* stream(address, keys, prompt, params) {
  const requestId = randomBytes(12).toString("hex"), output = [];
  let socket = await reach(address, keys), ended = false;
  try {
    while (!ended) {
      try { // the tokens that have arrived are sent along, and the stream continues after them
        await send(socket, "generate", requestId, packed(prompt), params, output.length, packed(output));
        while (!ended) {
          const [kind, , outputs] = await receive(socket, SILENCE_MS, PING);
          for (const [tag, , start, tokenIds, reason, , error] of kind === "outputs" ? outputs : []) {
            const added = tokenIds.slice(output.length - start);
            output.push(...added);
            yield added;
            ended = tag === "finished";
            if (ended && reason === "error") throw new Failure(error);
          }
        }
      } catch (error) {
        if (!(error instanceof Lost)) throw error;
        socket.close();
        socket = await reach(address, keys);
      }
    }
  } finally {
    if (!ended && !socket.closed) await send(socket, "abort", requestId);
    socket.close();
  }
}

async function main() {
  const options = { keys: { type: "string" }, "max-tokens": { type: "string", default: "50" } };
  let given;
  try {
    given = parseArgs({ options, allowPositionals: true });
  } catch (error) {
    throw new Failure(`${error.message}; ${USAGE}`);
  }
  const { values, positionals: [address, ...words] } = given;
  const isTokenId = (word) => /^\d+$/.test(word) && Number(word) < 2 ** 32;
  if (address === undefined || words.length === 0 || !words.every(isTokenId) || !/^\d+$/.test(values["max-tokens"])) {
    throw new Failure(USAGE);
  }
  const params = { max_tokens: Number(values["max-tokens"]), temperature: 0 };
  for await (const tokenIds of stream(address, values.keys, words.map(Number), params)) {
    process.stdout.write(tokenIds.map((token) => `${token} `).join(""));
  }
  process.stdout.write("\n");
}

main().catch((error) => {
  if (!(error instanceof Failure)) throw error;
  process.stderr.write(`raw_client: ${error.message}\n`);
  process.exit(1);
});
