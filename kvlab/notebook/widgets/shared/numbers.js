// --- numbers --------------------------------------------------------------------------------
// Bytes in powers of ten say GB, in powers of two GiB. Values may be numbers or BigInts.

function digits(value, places) {
  // Halves go to the even digit, as in Python: 288.125 is 288.12 on both sides.
  return Number(value).toLocaleString("en-US", {
    minimumFractionDigits: places, maximumFractionDigits: places, roundingMode: "halfEven" });
}

function scaled(value, base, units, places) {
  let [v, i] = [Number(value), 0];
  while (Math.abs(v) >= base && i < units.length - 1) { v /= base; i += 1; }
  return `${digits(v, i === 0 && Number.isInteger(v) ? 0 : places)} ${units[i]}`;
}

const format = {
  integer: (v) => (typeof v === "bigint" ? v : Math.round(v)).toLocaleString("en-US"),
  number: (v, places = 2) => digits(v, places),
  gb: (v, places = 2) => scaled(v, 1000, ["B", "kB", "MB", "GB", "TB", "PB"], places),
  gib: (v, places = 2) => scaled(v, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], places),
  flop: (v, places = 2) =>
    scaled(v, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"], places),
  seconds: (v, places = 2) => (v >= 1 ? `${digits(v, places)} s` : v >= 1e-3 ? `${digits(v * 1e3, places)} ms`
    : `${digits(v * 1e6, places)} µs`),
  times: (v, places = 1) => `${digits(v, v >= 100 ? 0 : places)}×`,
  percent: (v, places = 1) => `${digits(v * 100, places)} %`,
};
