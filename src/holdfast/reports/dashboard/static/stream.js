// Follows the server's stream of changes, and comes back by itself when it was cut.

const AGAIN_MS = 2000;

// `topics`: a function for each topic. `told`: is given the state of the connection.
export function follow(topics, told) {
  const source = new EventSource("/api/stream");
  source.addEventListener("open", () => told(true));
  for (const [topic, take] of Object.entries(topics)) {
    source.addEventListener(topic, (message) => take(JSON.parse(message.data)));
  }
  source.addEventListener("error", () => {
    told(false);
    if (source.readyState === EventSource.CLOSED) {
      source.close();
      setTimeout(() => follow(topics, told), AGAIN_MS);
    }
  });
}
