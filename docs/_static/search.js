/* Sphinx' own weights, and guides before the reference where both fit alike: tests/test_built_pages.py. */
var Scorer = {
  score: ([page, , , , score]) => (page.startsWith("api") ? score - 2 : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
