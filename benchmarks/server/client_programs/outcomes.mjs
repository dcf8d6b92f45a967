// What the Node programs of this folder share; ``outcomes.py`` is the same in Python.
export const [url, model] = process.argv.slice(2);
export const parameters = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Rome"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};

class Skip extends Error {}

export function check(condition, said) {
  if (!condition) throw new Error(JSON.stringify(said)?.slice(0, 300));
}

export function checkWeather(found) {
  check(["Oslo", "Rome"].includes(found.city) && found.days >= 1 && found.days <= 9, found);
}

export async function served(path) {
  const reply = await fetch(`${url}/openapi.json`);
  if (!(path in (await reply.json()).paths)) throw new Skip(`the server has no ${path}`);
}

// Tries every feature, each whatever became of the others.
export async function main(features) {
  for (const [feature, run] of Object.entries(features)) {
    const began = performance.now();
    let outcome = "works";
    let said = "";
    try {
      await run();
    } catch (error) {
      outcome = error instanceof Skip ? "skipped" : "fails";
      said = String(error.message ?? error).slice(0, 300);
      if (outcome === "fails") console.error(error);
    }
    const seconds = Math.round((performance.now() - began) / 10) / 100;
    console.log(JSON.stringify({ feature, outcome, seconds, said }));
  }
}
