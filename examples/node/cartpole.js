// CartPole-v1 with the physics of Gymnasium: balance a pole on a cart by pushing the cart left or right.
//
// Observation: Float32Array [position m, velocity m/s, angle rad, angular velocity rad/s].
// Action: 0 pushes left, 1 right. Reward 1 per step; terminated when cart or pole leave their limits,
// truncated after 500 steps.

const GRAVITY = 9.8;
const MASS_POLE = 0.1;
const MASS_TOTAL = 1.0 + MASS_POLE;
const LENGTH = 0.5; // half of the pole's
const FORCE = 10.0;
const TAU_S = 0.02;
const MOST_ANGLE = (12 * 2 * Math.PI) / 360;
const MOST_POSITION = 2.4;
const MOST_STEPS = 500;

export class CartPole {
  // `random` returns numbers in [0, 1).
  constructor(random = Math.random) {
    this.random = random;
    this.reset();
  }

  // The first observation of an episode, each number uniform in ±0.05.
  reset() {
    this.state = Array.from({ length: 4 }, () => this.random() * 0.1 - 0.05);
    this.steps = 0;
    return Float32Array.from(this.state);
  }

  // { observation, reward, terminated, truncated } of one Euler step.
  step(action) {
    let [position, velocity, angle, spin] = this.state;
    const [cosine, sine] = [Math.cos(angle), Math.sin(angle)];
    const push = (action === 1 ? FORCE : -FORCE) + MASS_POLE * LENGTH * spin * spin * sine;
    const swing =
      (GRAVITY * sine - (cosine * push) / MASS_TOTAL) /
      (LENGTH * (4 / 3 - (MASS_POLE * cosine * cosine) / MASS_TOTAL));
    const pull = (push - MASS_POLE * LENGTH * swing * cosine) / MASS_TOTAL;
    position += TAU_S * velocity;
    velocity += TAU_S * pull;
    angle += TAU_S * spin;
    spin += TAU_S * swing;
    this.state = [position, velocity, angle, spin];
    this.steps += 1;
    const terminated = Math.abs(position) > MOST_POSITION || Math.abs(angle) > MOST_ANGLE;
    const truncated = !terminated && this.steps >= MOST_STEPS;
    return { observation: Float32Array.from(this.state), reward: 1, terminated, truncated };
  }
}

// Numbers in [0, 1) that are the same for the same seed (mulberry32).
export function seeded(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}
