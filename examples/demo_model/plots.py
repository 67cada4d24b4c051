"""The plots of the demo model's little language: what kinds of document there are, as sentence templates.

A plot is a sequence of stages parted by blank lines, each with one template a line; a first line ``lo-hi`` says how
many sentences the stage gives (default one). A stage that starts with ``user`` holds the requests of a chat.

Slots are written ``{var}`` or ``{var.form}``: the variable says which record of its table, the form which of its
strings. A capital form (``{hero.She}``) capitalises; a leading ``_`` makes the variable local to its sentence; trailing
digits distinguish variables over one table. An emoji at the end of a template is optional. No sentence may end inside
a quotation.
"""

OPEN = """
Once upon a time there was {_trait.a} {kind} named {hero}.
Once upon a time, {land}, there lived {_trait.a} {kind} named {hero}.
There once was {_trait.a} {kind} called {hero}, who lived {kind.home}.
Long ago, {land}, there lived {_trait.a} {kind} called {hero}.
In a land far away lived {_trait.a} {kind} named {hero}.
This is the story of {hero}, {_trait.a} {kind}.
{hero} was {_trait.a} {kind} who lived {kind.home}.

0-2
{hero.She} was sure that nobody sleeps better than {kind.a} {kind.home}.
Everyone liked {hero.him} because {hero.she} was so {_mild}.
{hero.She} loved {_food} more than anything else.
Every morning {hero.she} ate {_food} and looked at the sky.
{hero} said “{kind.sound}” whenever {hero.she} was happy.
"""
CLOSE = """
From that day on, {hero} and {friend} were best friends. {kind.emoji}
And so {hero} and {friend} lived happily ever after. {kind.emoji}
{hero} never forgot that {_moral}. {kind.emoji}
And that is how {hero} learned that {_moral}. {kind.emoji}
That night {hero} fell asleep with a smile. {kind.emoji}
And if you walk by late in the evening, you can still hear them laugh. {kind.emoji}
"""
ASK = """
user
Tell me a story about {kind.a}.
Tell me a story.
Can you tell me a story about {kind.a} named {hero}?
Please write a short story about {kind.a}.
Write a story about {kind.a}.
I would like to hear a story about {hero} the {kind}.
Please tell me a bedtime story about {kind.a} called {hero}.
Do you know a story about {kind.a}?
Tell me a bedtime story, please.
"""
MEET = """
Just then {friend} the {fkind} came by.
{friend}, {_trait.a} {fkind}, heard {hero.him} and came closer.
Soon {hero} met {_trait.a} {fkind} named {friend}.
{_place.Name} {hero.she} met {friend}, {_trait.a} {fkind}.
"""
STORIES = {
    "lost": """
Tell me a story about {kind.a} who lost {thing.a}.

{_time}, {hero} could not find {hero.her} {thing}.
{_time}, the wind blew {hero.her} {thing} away.
{_time}, {hero.her} {thing} was gone.

1-2
{hero.She} looked {_spot} and {_spot2}, but it was not there.
{hero.She} searched everywhere, but found only {_junk}.
“Where is my {thing}?” asked {hero}.
“Oh no, I need my {thing}!” cried {hero}.
{hero} felt {_sad} and sat down {_place}.

@meet

“Do not worry, we will find it together,” said {friend}.
“I can help you look for your {thing},” said {friend} with a smile.
“Tell me what it looks like,” said {friend}.

They looked {_spot}, {_spot2} and even {_spot3}.
They asked everyone {_place}, but nobody had seen the {thing}.

At last {friend} found the {thing} {_spot}.
And there it was, {_spot}, safe and sound.
Suddenly {hero} saw the {thing} {_spot}.

1-2
{hero} was so {_glad} that {hero.she} danced {_place}.
“Thank you, {friend}, you are a true friend!” said {hero}.
To say thank you, {hero} gave {friend} some {_food}.
""",
    "feast": """
Tell me a story about {kind.a} who makes {dish}.

{_time}, {hero} wanted to make {dish} for {hero.her} friend {friend} the {fkind}.
{_time}, {hero} invited {friend} the {fkind} for supper and began to make {dish}.

{hero.She} took out a big bowl, but there was no {missing} left.
But when {hero.she} opened the cupboard, the {missing} was gone.

“How can I make {dish} without {missing}?” asked {hero}.
{hero} felt {_sad}, because nobody can make {dish} without {missing}.
“No {missing} means no {dish},” said {hero}.

1-2
{hero.She} asked everyone {_place}, but nobody had any {missing}.
In the cupboard {hero.she} found only {_junk}.
{hero.She} walked all the way to the market and back.

Then {friend} knocked on the door with a jar of {missing}.
“I brought some {missing} for you,” said {friend} at the door.
At that moment {friend} arrived and pulled some {missing} out of a bag.

They stirred and baked and sang until supper was ready.
Together they made the best {dish} in the whole valley.

1-2
{friend} ate three plates and asked for more.
“This is the best {dish} of my life!” said {friend}.
They ate until the moon stood high above the trees.
""",
    "skill": """
Tell me a story about {kind.a} who learns to {skill}.

{hero} wanted to learn to {skill}.
More than anything, {hero} wished to {skill}.

1-2
{_time}, {hero.she} tried for the first time, but it went wrong.
Every day {hero.she} practised {_place}.
But it was hard, and {hero} felt {_sad}.
“I will never learn to {skill},” said {hero}.

@meet

“I could not {skill} at first either,” said {friend}.
“Try once more, and do not hurry,” said {friend}.
“Let us practise together,” said {friend}.

1-2
So they practised for {_minute} days.
{hero} fell down, laughed and got up again.
{friend} showed {hero.him} how to begin slowly.

And then, {_place}, {hero.she} could {skill} for the very first time.
On {_day}, {hero.she} could {skill} so well that everyone clapped.

“Look, I can {skill}!” cried {hero}.
{hero} was so {_glad} that {hero.she} hugged {friend}.
They ate {_food} to celebrate.
""",
    "journey": """
Tell me a story about {kind.a} who wants to see {wonder}.

{hero} had never seen {wonder}.
All {hero.her} life, {hero} had dreamed of {wonder}.

{_time}, {hero.she} packed some {_food} and {_thing.a} and set out.
So {_day} came, and {hero} set out with {_thing.a} and some {_food}.

1-2
{hero.She} {_walk} and {_walk2}.
The road was long, and {hero} felt {_sad}.
{hero.She} {_walk}, and still there was no sign of {wonder}.

@meet

“Where are you going?” asked {friend}.
“Do you know where I can find {wonder}?” asked {hero}.

“I am looking for {wonder},” said {hero}.
“I have always wanted to see {wonder} too,” said {friend}.
“Come with me, I know the way,” said {friend}.

So they {_walk} together.
So they {_walk} and {_walk2}.

0-1
At noon they shared some {_food} {_place}.

And there, at last, they saw {wonder}.
Then they looked up and saw {wonder}.

“It is even more beautiful than I thought,” whispered {hero}.
{hero} was so {_glad} that {hero.she} could not speak.
They sat side by side and said nothing for a long time.
""",
    "storm": """
Tell me a story about {kind.a} in a {storm}.

{_time}, a great {storm} came over the land.
{_time}, the sky turned dark and a {storm} began.

1-2
{hero} was safe at home {kind.home}.
{hero} closed the door and made some {_food}.
The {storm} howled all night long.

Suddenly there was a knock at the door.
Then {hero} heard somebody call for help.

Outside stood {friend}, {_trait.a} {fkind}, all wet and cold.
It was {friend} the {fkind}, who had lost {_thing.a} and the way home.

“Please let me in,” said {friend}.
“Come in and sit by the fire,” said {hero}.
“The {storm} took my home,” said {friend}.

1-2
{hero} gave {friend} a warm blanket and some {_food}.
They told each other stories until the {storm} was over.
They shared the last of the {_food}.

In the morning the {storm} was gone and the sun was shining.
When the {storm} had passed, they went outside to look around.

Together they built a new home for {friend}.
“You can stay as long as you like,” said {hero}.
All the neighbours came to help {friend}.
""",
    "share": """
Tell me a story about {kind.a} who shares {thing.a}.

{_time}, {hero} and {friend} the {fkind} found {thing.a} {_spot}.
{_time}, {hero} was walking with {friend} the {fkind} when they saw {thing.a} {_spot}.

“It is mine!” said {hero}.
“I saw it first!” said {friend}.

1-2
They pulled and pulled, and nobody would let go of the {thing}.
They did not speak to each other for {_minute} days.
{hero} took the {thing} home, but it was no fun alone.

{hero} felt {_sad} without {friend}.
{hero.She} looked at the {thing} and felt {_sad}.

“I am sorry, let us share the {thing},” said {hero}.
“You can have it on {_day},” said {hero} to {friend}.

1-2
{friend} smiled and gave {hero.him} some {_food}.
After that they took turns with the {thing}.
They played with the {thing} {_place} until it was dark.
""",
}
HOWTOS = """
make tea | a cup, a kettle and some tea leaves
  boil the water; put the tea leaves into the cup; pour the hot water over the leaves; wait {_minute} minutes; take
  out the leaves and add a little honey
Enjoy your tea! 🍵

make pancakes | flour, milk, two eggs and a pan
  mix the flour and the milk; add the eggs and stir well; heat some butter in the pan; bake each pancake until it is
  golden; serve the pancakes with {_fruit}
Enjoy your pancakes! 🥞

make lemonade | four lemons, sugar and cold water
  cut the lemons in half; press out the juice; stir in {_minute} spoons of sugar; fill the jug with cold water; add
  ice and some {_fruit}
Enjoy your lemonade! 🍋

make a fruit salad | a bowl, a knife, {fruit} and {fruit2}
  wash the {fruit}; cut the {fruit} and the {fruit2} into small pieces; put everything into the bowl; add a little
  lemon juice; stir gently and serve
Enjoy your fruit salad!

make a café au lait | strong coffee, warm milk and a large cup
  brew the coffee; heat the milk slowly; whisk the milk until it foams; pour the coffee and the milk into the cup
  together
Santé! ☕

bake bread | flour, water, yeast and salt
  mix the flour, the yeast and the salt; add warm water and knead for {_minute} minutes; let the dough rest for an
  hour; shape a round loaf; bake the loaf until it is brown
Enjoy your bread! 🍞

plant a sunflower | a pot, some soil and a seed
  fill the pot with soil; press the seed into the soil; water it gently; put the pot in a sunny place; wait and
  water it every {_day}
Soon your sunflower will smile at you. 🌻

fold a paper boat | a sheet of {colour} paper
  fold the paper in half; fold the two corners to the middle; fold up the edges; pull the middle open; set the
  {colour} boat on the water
Have a good journey! ⛵

build a snowman | snow, a carrot and some stones
  roll a big ball of snow; roll a smaller ball and put it on top; add a third ball for the head; use the carrot as a
  nose; give your snowman a {_colour} scarf
Have fun in the snow! ⛄

draw a cat | paper and a {colour} pencil
  draw a big circle for the body; draw a small circle for the head; add two pointed ears; draw whiskers and a long
  tail; colour the cat with your {colour} pencil
What a lovely cat! 🐱

build a sandcastle | a bucket, a spade and wet sand
  fill the bucket with wet sand; turn the bucket over quickly; lift the bucket slowly; build {_minute} more towers;
  put a {_colour} flag on top
Your castle is ready! 🏰

wrap a present | a box, {colour} paper and a ribbon
  put the present into the box; lay the box on the {colour} paper; fold the paper around the box; tie the ribbon;
  write a small card
Somebody will be very happy! 🎁

build a blanket fort | two chairs, a big blanket and some pillows
  put the chairs back to back; hang the blanket over the chairs; lay the pillows on the floor; bring a lamp and a
  book; crawl inside and read for {_minute} minutes
Welcome to your fort!

wash a teddy bear | warm water, soap and a towel
  fill a bowl with warm water; add a little soap; wash the teddy bear gently; press out the water with the towel;
  let the teddy bear dry in the sun
Your teddy bear says thank you! 🧸

make a paper lantern | {colour} paper, glue and a candle
  fold the {colour} paper in half; cut lines into the folded side; open the paper and glue the ends together; add a
  handle; put a small light inside
How nicely it shines! 🏮

feed the birds | seeds, nuts and a small dish
  mix the seeds and the nuts; put them into the dish; hang the dish in a tree; wait quietly for {_minute} minutes;
  count the birds that come
The birds will sing for you. 🐦
"""
SHORT = {
    "intro": """
Hello, my name is {hero}.
Hi, my name is {hero}.

I am {_trait.a} {kind} and I live {kind.home}.
I am {_trait.a} {kind} and my home is {land}.

1-3
My favourite food is {_food}.
I can {_skill}, but I cannot {_skill2}.
I always carry {_thing.a} with me.
My best friend is {friend} the {fkind}.
When I am happy, I say “{kind.sound}”.

1-2
Every {_day} we {_game}.
On {_day} I like to {_game}.
One day I want to see {_wonder}.

It is nice to meet you! {kind.emoji}
Come and visit me soon! {kind.emoji}
""",
    "facts": """
3-6
The capital of {_capital} is {_capital.city}.
The future of {_future} is {_mood} and {_mood2}.
The president of the {_club} is {_name} the {_kind}.
The home of a {_kind} is {_kind.home}.
The sum of {_sum.a} and {_sum.b} is {_sum.sum}.
""",
    "home": "user\nWhere does {kind.a} live?\nWhat is the home of {kind.a}?\n\n"
    "{kind.A} lives {kind.home}. {kind.emoji}",
    "sound": "user\nWhat does {kind.a} say?\nWhat sound does {kind.a} make?\n\n"
    "{kind.A} says “{kind.sound}”. {kind.emoji}",
    "baby": "user\nWhat is a baby {kind} called?\nWhat do you call a baby {kind}?\n\n"
    "A baby {kind} is called {kind.baby}. {kind.emoji}",
    "food": "user\nWhat does {kind.a} eat?\nWhat do you feed {kind.a}?\n\n"
    "{kind.A} likes to eat {kind.food}. {kind.emoji}",
    "sum": "user\nWhat is {sum.a} plus {sum.b}?\nHow much is {sum.a} and {sum.b}?\nWhat is {sum.da} + {sum.db}?\n\n"
    "{sum.A} plus {sum.b} is {sum.sum}.",
    "capital": "user\nWhat is the capital of {capital}?\nWhich city is the capital of {capital}?\n\n"
    "The capital of {capital} is {capital.city}.",
    "joke": "user\nTell me a joke.\nDo you know a joke?\nMake me laugh!\nAnother joke, please.\n\n"
    "{joke.q}?\n\n{joke.answer}! 😄",
    "hello": """
user
Hello!
Hi there!
Good morning!
Hi!
How are you?
Hey!

Hello! 👋
Hi, it is nice to meet you! 👋

I know small stories, animals, sums, jokes and a few recipes.
Would you like to hear a story about {kind.a}?
""",
    "who": """
user
Who are you?
What can you do?
What is your name?
What are you?
Tell me about yourself.
Help!

I am the demo model of vllm_lite, and I am very small.
I am a very small language model that lives inside vllm_lite.

I know small stories, animals, sums, jokes and a few recipes.

Try to ask me for a story about {kind.a}. {kind.emoji}
""",
    "thanks": """
user
Thank you!
Thanks!
That was nice.
What a lovely story!
Great, thank you.

You are welcome! 😊
It was a pleasure! 😊
""",
    "bye": """
user
Goodbye!
Bye!
Good night!
See you soon.

Goodbye, and come back soon! 👋
Sleep well and dream of {_wonder}! 🌙
""",
    "unknown": """
user
Tell me about {_topic}.
What do you know about {_topic}?
Can you explain {_topic}?
Write an essay about {_topic}.
Explain {_topic} to me, please.
What do you think about {_topic} and {_topic2}?

I am sorry, I am too small to know about that.
I am only a little model, so I do not know much about that.

But I can tell you a story about {kind.a}. {kind.emoji}
But you can ask me how to make tea. 🍵
But ask me what {kind.a} says, and I will tell you.
""",
}
