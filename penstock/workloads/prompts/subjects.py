"""What the built-in prompts are about, by category: a dozen subjects each, for runs without a corpus."""

from typing import Final

from penstock.workloads.prompts.categories import Category

SUBJECTS: Final[dict[Category, tuple[str, ...]]] = {
    Category.CODE_GENERATION: (
        "parses dates in several formats", "merges two sorted lists", "validates an email address",
        "counts words in a file", "reads settings from a file", "retries a failed download",
        "rotates log files", "converts Roman numerals", "finds duplicates in a folder",
        "caches results for an hour", "sends a reminder every Monday", "sorts invoices by due date",
    ),
    Category.CODE_REVIEW: (
        "the login times out after a minute", "the printer queue never empties", "totals differ by a cent",
        "the menu is empty after an update", "uploads stop at two gigabytes", "the cache grows all night",
        "users are logged out at midnight", "the search ignores accents", "the clock is an hour late",
        "two orders get one number", "the second page is blank", "passwords are written to the log",
    ),
    Category.CONTENT_WRITING: (
        "the history of lighthouses", "saving water at home", "how cities plant trees", "the first railways",
        "learning a language at sixty", "why bees matter", "the rules of a good meeting",
        "old houses and their heating", "the life of a glacier", "reading to children",
        "what libraries lend today", "the return of the night train",
    ),
    Category.MARKETING_COPY: (
        "a bicycle for carrying children", "a bakery that opens at five", "a water filter without plastic",
        "a repair shop for radios", "a language course by post", "a raincoat made of old sails",
        "a coffee from one farm", "a museum of clocks", "a lamp that reads the weather",
        "a tea for long evenings", "a garden in a box", "a hotel without screens",
    ),
    Category.DATA_ANALYSIS: (
        "ticket sales of a theatre by weekday", "rainfall over forty years", "delays of a bus line",
        "complaints by product and month", "power use of three schools", "heights of a class over a year",
        "loans of a library by age", "prices of bread in ten cities", "visits to a page by hour",
        "yield of an orchard by variety", "defects by machine and shift", "answers of a survey on noise",
    ),
    Category.GENERAL_QA: (
        "the sky is blue", "ships float", "the moon has phases", "bread rises", "cats purr",
        "leap years exist",        "metal feels colder than wood", "onions make people cry",
        "magnets have two poles",
        "glass is transparent", "planes leave trails", "the sea is salty",
    ),
    Category.CREATIVE_WRITING: (
        "a lighthouse keeper and a whale", "the last tram of the night", "a clock that runs backwards",
        "two rivers that meet", "a letter that came too late", "a fox in the city", "the colour of rain",
        "a violin without strings", "the sleep of mountains", "a key without a door",
        "a grandmother who was a pilot", "snow in July",
    ),
}  # fmt: skip
