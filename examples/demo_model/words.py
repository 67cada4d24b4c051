"""The vocabulary of the demo model's little language: tables of records with several forms.

A name comes with its pronouns, an animal with its home and sound, so one record, once
chosen, decides every form that a text may show of it. The sentences that use these tables are in ``plots``.
"""

from __future__ import annotations

Record = dict[str, str]


def _table(forms: str, rows: str) -> list[Record]:
    """Read a table: form names, then one row a line with its fields separated by ``|``."""
    names = forms.split()
    lines = rows.strip().split("\n")
    records = [dict(zip(names, (cell.strip() for cell in line.split("|")), strict=True)) for line in lines]
    for record in records:
        if "name" in record and "a" not in record:
            vowel = record["name"][0].lower() in "aeiou" or record["name"] == "honest"
            record["a"] = ("an " if vowel else "a ") + record["name"]
    return records


def _words(text: str) -> list[Record]:
    return _table("name", text.strip().replace(";", "\n"))


def _names(girls: str, boys: str) -> list[Record]:
    she = [{"name": n, "she": "she", "her": "her", "him": "her"} for n in girls.split()]
    return she + [{"name": n, "she": "he", "her": "his", "him": "him"} for n in boys.split()]


NAMES = _names(
    "Mila Zoë Nora Lucía Chloé Ada Inès Freya Renée Ruby Tilda Maya Lily Søs",
    "Łukasz Otto Bruno José Finn Theo André Jürgen Oskar Sam Milo Hugo Tom Ben",
)
KINDS = _table(
    "name home emoji sound baby food",
    """
fox | in a cosy den | 🦊 | yip yip | a kit | berries
owl | in a hollow tree | 🦉 | hoo hoo | an owlet | mice
bear | in a warm cave | 🐻 | growl | a cub | honey
rabbit | in a deep burrow | 🐰 | sniff sniff | a bunny | carrots
hedgehog | under a heap of leaves | 🦔 | snuffle | a hoglet | beetles
mouse | in a hole in the wall | 🐭 | squeak | a pup | cheese
cat | in a little red house | 🐱 | meow | a kitten | fish
dog | in a wooden hut | 🐶 | woof | a puppy | bones
duck | on a quiet pond | 🦆 | quack | a duckling | pondweed
frog | on a green lily pad | 🐸 | ribbit | a tadpole | flies
otter | on the bank of a river | 🦦 | chirp | a pup | fish
squirrel | in an old oak tree | 🐿 | chatter | a kit | nuts
panda | in a bamboo grove | 🐼 | bleat | a cub | bamboo
penguin | on a white iceberg | 🐧 | honk | a chick | fish
turtle | on a sandy shore | 🐢 | hiss | a hatchling | seagrass
dragon | in a castle of stone | 🐉 | roar | a hatchling | hot chillies
lion | on the wide savannah | 🦁 | roar | a cub | meat
elephant | beside a great lake | 🐘 | toot | a calf | leaves
cow | in a big red barn | 🐮 | moo | a calf | grass
pig | in a muddy yard | 🐷 | oink | a piglet | apples
horse | in a stable | 🐴 | neigh | a foal | hay
sheep | on a grassy hill | 🐑 | baa | a lamb | clover
monkey | in a tall palm tree | 🐵 | ooh ooh | an infant | bananas
whale | in the deep blue sea | 🐳 | ooooh | a calf | krill
""",
)
TABLES: dict[str, list[Record]] = {
    "names": NAMES,
    "kinds": KINDS,
    "traits": _words(
        "brave; curious; clever; gentle; cheerful; shy; sleepy; patient; tiny; kind; honest; playful; quiet; hungry; "
        "old; young"
    ),
    "things": _words(
        "red kite; silver bell; old umbrella; blue scarf; toy boat; golden key; little drum; paper lantern; "
        "striped hat; tin trumpet; green ball; picture book; woollen blanket; magic stone; music box; copper pot"
    ),
    "lands": _words(
        "near the river; at the edge of the forest; on a small island; behind the old mill; in the green valley; "
        "close to the sea; in the mountains; next to a tiny café; at the end of a winding road"
    ),
    "places": _words(
        "by the river; under the old oak; at the market; in the meadow; in front of the café; on the bridge; near the "
        "well; on the hill; at the harbour; in the garden"
    ),
    "spots": _words(
        "under a mossy log; behind the oak tree; inside an old boot; on top of the haystack; between two stones; "
        "under the bed; in a pile of leaves; behind the curtain; in the tall grass; at the bottom of the basket; in a "
        "bird nest"
    ),
    "foods": _words(
        "honey cake; warm bread; berry pie; cheese toast; plum jam; cinnamon buns; noodles; roasted nuts; "
        "sweet apples; jalapeño chips; hot chocolate; blueberry muffins; potato salad"
    ),
    "dishes": _words(
        "crème brûlée; pumpkin soup; mushroom stew; apple strudel; vegetable curry; lemon tart; carrot cake; "
        "onion rings"
    ),
    "milds": _words("friendly; funny; polite; helpful; calm; lively; generous; charming"),
    "times": _words(
        "One morning; One day; One rainy afternoon; Late one evening; One windy day; One cold night; One Sunday"
    ),
    "junk": _words("a rusty nail; an empty jar; two old buttons; some dust; a lonely sock; three acorns; a broken cup"),
    "sads": _words("sad; lonely; worried; tired; a little afraid; lost; small"),
    "glads": _words("happy; proud; glad; thankful; relieved; excited"),
    "morals": _words(
        "a friend makes every road shorter; sharing makes everything sweeter; even small paws can do great things; it "
        "is good to ask for help; patience is worth more than speed; a kind word costs nothing; mistakes are how we "
        "learn; the best treasure is a friend; being different is a gift"
    ),
    "skills": _words(
        "swim; whistle; juggle; skate; dance; sing; paint; climb trees; play the violin; ride a bicycle; read"
    ),
    "wonders": _words(
        "the sea; the snow; the northern lights; a falling star; the big city; the highest mountain; a rainbow; the "
        "full moon; a waterfall; a ship with white sails"
    ),
    "walks": _words(
        "crossed a wide meadow; followed a narrow path; climbed over a steep hill; walked through a dark wood; sailed "
        "down a long river; slept under the stars; rested in a small café; waded through a cold stream"
    ),
    "storms": _words("storm; blizzard; flood; thunderstorm; snowstorm; gale"),
    "missing": _words("flour; sugar; butter; salt; milk; honey; cinnamon"),
    "games": _words(
        "count the stars; play hide and seek; tell stories; drink tea; fly kites; bake bread; look for shells"
    ),
    "days": _words("Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday"),
    "conns": _words("Then; Next; After that; Now"),
    "minutes": _words("two; three; four; five; ten; twenty; thirty"),
    "colours": _words("red; blue; yellow; green; orange; purple; pink; white"),
    "fruits": _words("strawberries; raspberries; bananas; apples; pears; cherries; plums; peaches"),
    "topics": _words(
        "computers; space travel; politics; football; history; chemistry; the stock market; cars; philosophy; "
        "programming; music; physics; the weather; medicine; law; geography; television; the internet; robots; "
        "poetry; mathematics; dinosaurs"
    ),
    "futures": _words("AI; music; books; small models; the forest; travel; cooking; friendship; open software"),
    "moods": _words("bright; open; friendly; green; full of wonder; calm; small and fast; full of songs; kind"),
    "clubs": _words(
        "tea club; river choir; garden society; chess club; United States; night market; paper boat league"
    ),
    "capitals": _table(
        "name city",
        "France | Paris\nSpain | Madrid\nItaly | Rome\nGermany | Berlin\nPoland | Warsaw\nJapan | Tokyo\n"
        "Egypt | Cairo\nPeru | Lima\nKenya | Nairobi\nNorway | Oslo\nGreece | Athens\nPortugal | Lisbon\n"
        "Canada | Ottawa\nCuba | Havana\nAustria | Vienna\nIreland | Dublin\nBrazil | Brasília\n"
        "Iceland | Reykjavík\nSweden | Stockholm\nColombia | Bogotá",
    ),
    "jokes": _table(
        "q answer",
        "Why did the duck cross the road | Because the chicken was on holiday\n"
        "What do you call a sleeping dragon | A warm house\n"
        "Why do owls never get lost | Because they always know who to ask\n"
        "What did the big kettle say to the small kettle | You are too young to whistle\n"
        "Why did the bear skip dessert | Because he was already stuffed\n"
        "What is a frog's favourite drink | Croak cola\n"
        "Why was the baby penguin so polite | Because he was brought up on ice\n"
        "Why do bees have sticky hair | Because they use honeycombs",
    ),
}
_NUMBERS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
]
TABLES["sums"] = [
    {"a": _NUMBERS[i], "b": _NUMBERS[j], "sum": _NUMBERS[i + j], "da": str(i), "db": str(j)}
    for i in range(6)
    for j in range(6)
]
# Which table a variable ranges over, where its name does not say so.
VARIABLES = {
    "hero": "names",
    "friend": "names",
    "fkind": "kinds",
    "dish": "dishes",
    "missing": "missing",
    "junk": "junk",
}
