// Stream a completion from Node.js: node raw_client.mjs ADDRESS [--keys FOLDER] [--max-tokens N] TOKEN_ID...
//
// An example to copy: `npm install` beside it fetches ZeroMQ and msgpack; docs/protocol.md has all the rest. Prints the
// token ids as they come. For a tcp address --keys is the folder that `vllm-lite keys` made for this client.

import { randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

const VERSION = 8;
// How long an engine may load; and be silent later, when it owes an answer and says every half second that it lives.
const LOAD_MS = 60_000, SILENCE_MS = 30_000;

class Failure extends Error {}

function connect(address, keys) {
  const socket = new Dealer({ linger: 500, heartbeatInterval: 5_000, heartbeatTimeout: 30_000 });
  if (keys !== undefined) {
    const own = readFileSync(`${keys}/client.key_secret`, "utf8");
    socket.curvePublicKey = key("public", own);
    socket.curveSecretKey = key("secret", own);
    socket.curveServerKey = key("public", readFileSync(`${keys}/server.key`, "utf8"));
  }
  socket.connect(address);
  return socket;
}

function key(kind, text) {
  const match = text.match(new RegExp(`^\\s*${kind}-key = "(.{40})"`, "m"));
  if (match === null) throw new Failure(`a file of --keys has no ${kind}-key`);
  return match[1];
}

// Tag and fields, in their order.
const send = (socket, ...message) => socket.send(encode(message));

async function receive(socket, timeoutMs) {
  socket.receiveTimeout = timeoutMs;
  let frame;
  try {
    [frame] = await socket.receive();
  } catch (error) {
    if (error.code !== "EAGAIN") throw error;
    throw new Failure(`nothing came within ${timeoutMs / 1000} s; is the address right, are the keys?`);
  }
  const message = decode(frame, { useBigInt64: true }); // epochs may be larger than a double holds exactly
  if (message[0] === "refused" || message[0] === "dying") throw new Failure(`${message[0]}: ${message[1]}`);
  return message;
}

// Yields arrays of token ids as they come. Ends with the request.
async function* stream(socket, prompt, params) {
  const requestId = randomBytes(12).toString("hex");
  const bytes = Buffer.alloc(4 * prompt.length);
  prompt.forEach((token, place) => bytes.writeUInt32LE(token, 4 * place));
  await send(socket, "generate", requestId, bytes, params);
  let ended = false;
  try {
    while (!ended) {
      const [kind, , outputs] = await receive(socket, SILENCE_MS);
      for (const [tag, , , tokenIds, reason, , error] of kind === "outputs" ? outputs : []) {
        yield tokenIds;
        ended = tag === "finished";
        if (ended && reason === "error") throw new Failure(error);
      }
    }
  } finally {
    if (!ended) await send(socket, "abort", requestId);
  }
}

async function main() {
  const options = { keys: { type: "string" }, "max-tokens": { type: "string", default: "50" } };
  const { values, positionals } = parseArgs({ options, allowPositionals: true });
  const [address, ...words] = positionals;
  if (address === undefined || words.length === 0 || !words.every((word) => /^\d+$/.test(word))) {
    throw new Failure("usage: node raw_client.mjs ADDRESS [--keys FOLDER] [--max-tokens N] TOKEN_ID...");
  }
  const socket = connect(address, values.keys);
  await send(socket, "hello", VERSION, null);
  await receive(socket, LOAD_MS);
  const params = { max_tokens: Number(values["max-tokens"]), temperature: 0 };
  for await (const tokenIds of stream(socket, words.map(Number), params)) {
    process.stdout.write(tokenIds.map((token) => `${token} `).join(""));
  }
  process.stdout.write("\n");
  socket.close();
}

main().catch((error) => {
  if (!(error instanceof Failure)) throw error;
  process.stderr.write(`raw_client: ${error.message}\n`);
  process.exit(1);
});
