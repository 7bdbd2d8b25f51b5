// Requests to this server: JSON, and streams of server-sent events.

let key = "";

export function useKey(value) {
  key = value;
}

export class ApiError extends Error {
  constructor(status, error) {
    super(error.message ?? `status ${status}`);
    this.status = status;
    this.code = error.code ?? null;
  }
}

function headers() {
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function checked(reply) {
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => ({}));
  throw new ApiError(reply.status, body.error ?? { message: `${reply.status} ${reply.statusText}` });
}

export async function getJson(path) {
  return (await checked(await fetch(path, { headers: headers() }))).json();
}

export async function getText(path) {
  return (await checked(await fetch(path, { headers: headers() }))).text();
}

// Calls `take` with the JSON of each event, until the stream ends. A stream that fails ends with an error.
export async function stream(path, body, signal, take) {
  const request = { method: "POST", headers: headers(), body: JSON.stringify(body), signal };
  const reply = await checked(await fetch(path, request));
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError(0, { message: "The server broke the answer off." });
    const events = (pending + value).split("\n\n");
    pending = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(reply.status, chunk.error);
      take(chunk);
    }
  }
}
