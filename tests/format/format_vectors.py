"""Test vectors of the EXL3 format document, typed in: exllamav3's own decoder made them.

Hex numbers of 16 bits are written as in the document, so the two can be compared by eye.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CODEBOOK_SHA256 = {
    "3inst": "ad88de2dcff5bb05fff2faec37cceceb43aa1c2e8203f9d81a6fbd6dd3393eea",
    "mcg": "95383563929baa9d1ae5de0be22490284382673620bdd85929feea7bdbef04a9",
    "mul1": "bc48d02cb1c14939dc47b90f870dd689d63e3b1ab69a157e65538db68677a6c8",
}

CODEBOOK_STATES = "0000 0001 0002 0003 1234 7fff 8000 cafe ffff"
CODEBOOK_VALUES = {
    "3inst": "3a25 bb5b 3b74 34b6 c066 ba96 b7f8 c130 b110",
    "mcg": "3f60 304e ba13 3ab8 3e0f 4172 b915 bfaa 3acd",
    "mul1": "c2e8 3921 b72d 3239 b89e 3fca baf2 bf81 b936",
}

# mean, standard deviation, minimum, maximum, distinct values
CODEBOOK_STATISTICS = {
    "3inst": (+0.000210, 1.243711, -3.9570, +3.9727, 10598),
    "mcg": (-0.000037, 1.244112, -3.9492, +3.9492, 10746),
    "mul1": (-0.001931, 1.000310, -3.4531, +3.3477, 913),
}


@dataclass(frozen=True)
class RateVector:
    """One packed tile: its first words, some states, and the decoded tile per codebook.

    `states_sha` and the second of each pair in `tiles` are the first 16 hex digits of a SHA-256;
    the first of each pair are the elements at `TILE_ELEMENTS`.
    """

    bits: float
    words: str
    states: str
    last_state: str
    states_sha: str
    tiles: dict[str, tuple[str, str]]

    def packed(self) -> np.ndarray:
        """The tile: stored word q is 40503 * (q + 1) + 257 * 2 * bits, modulo 2^16."""
        return ramp(int(16 * self.bits), int(257 * 2 * self.bits))


TILE_ELEMENTS = ((0, 0), (0, 1), (1, 0), (8, 0), (0, 8), (15, 15))

RATES = (
    RateVector(
        1,
        "a039 3e70 dca7 7ade",
        "8e76 1cec 39d9 73b3",
        "473b",
        "2118db4ad6078bd2",
        {
            "3inst": ("b992 39b6 c045 1d40 b12e c104", "cd8c571cac7ed81a"),
            "mcg": ("384a 3c32 bca8 c039 2680 3c46", "01a0948315c703ef"),
            "mul1": ("3562 a3dc 3982 34a0 b64f 3c22", "cd3a29ee1b9bd5ea"),
        },
    ),
    RateVector(
        1.5,
        "a13a 3f71 dda8 7bdf",
        "73e8 cfa1 9f43 7d0f",
        "39f4",
        "d915a7a2f93782ea",
        {
            "mul1": ("38b2 2f3f b764 3dd0 bc80 34bc", "cbbc9c51caa961fd"),
        },
    ),
    RateVector(
        2,
        "a23b 4072 dea9 7ce0",
        "b2b5 cad4 2b50 ad40",
        "2cad",
        "0c4d06b293eb81c9",
        {
            "3inst": ("32d2 3c8b ba8c 405c b80e b384", "6f898806f9162498"),
            "mcg": ("30d8 bdd8 3a5b b77e b8de 3810", "6191ff9f2f225afb"),
            "mul1": ("38a4 b2fd 38dc bbeb 35b6 c059", "3c178d95285cff1e"),
        },
    ),
    RateVector(
        2.5,
        "a33c 4173 dfaa 7de1",
        "7d99 ecc8 b320 9905",
        "1f66",
        "8ca2d50244dab0be",
        {
            "mul1": ("3c4c 3b9e a3dc 3ec9 be73 3851", "c1dc5d81abeada25"),
        },
    ),
    RateVector(
        3,
        "a43d 4274 e0ab 7ee2",
        "90fa 87d0 3e84 f427",
        "121f",
        "43cdb805e21a32a4",
        {
            "3inst": ("3b9a 35e8 bcb2 3cad 3e34 3d92", "9ed8571c05e3d020"),
            "mcg": ("30b8 b92f 3a93 c078 3f6d c224", "983fd1ba8a44213c"),
            "mul1": ("3da6 3485 3bac adbf 3609 b257", "eaa946c3b451dfaa"),
        },
    ),
    RateVector(
        3.5,
        "a53e 4375 e1ac 7fe3",
        "26c2 6c21 610d 10dd",
        "04d8",
        "f433fd08239a9f4a",
        {
            "mul1": ("bc34 3ffa 3c3e b5a9 b813 3a52", "2ec0cf08e5c44328"),
        },
    ),
    RateVector(
        4,
        "a63f 4476 e2ad 80e4",
        "7914 9144 1447 4476",
        "f791",
        "791f277372cd1863",
        {
            "3inst": ("c0cf bdf5 c023 bdab b819 c1e2", "29e535d77490c295"),
            "mcg": ("3d77 b8a6 c0a0 2e00 30f4 b948", "ad5012487945e47a"),
            "mul1": ("b064 b334 bd49 39c7 2677 3f0f", "66d8137381782ccb"),
        },
    ),
    RateVector(
        5,
        "a841 4678 e4af 82e6",
        "a068 0d19 a33c 678a",
        "dd03",
        "0bc52dcf23f0f437",
        {
            "3inst": ("36b5 b240 b528 3ed2 b624 3952", "6134d05815d926e7"),
            "mcg": ("3c26 be6c 34f8 4160 3a84 b6cd", "a152ef83a1afca6e"),
            "mul1": ("bc18 bf58 bc42 3c9f b571 bdc6", "386e78d24ee84942"),
        },
    ),
    RateVector(
        6,
        "aa43 487a e6b1 84e8",
        "9d52 5487 21ea 7aaa",
        "c275",
        "8f1c6ebbd296372d",
        {
            "3inst": ("2500 3000 3582 34bc 3969 3422", "c275f57dd359c6d1"),
            "mcg": ("bcba 3bcf bb05 a580 39ae bb47", "e3a25b88f6882865"),
            "mul1": ("b84b 371e b28e af0c b5fc 3843", "44e43e1314947d86"),
        },
    ),
    RateVector(
        7,
        "ac45 4a7c e8b3 86ea",
        "f3a5 d29f 4f95 cac4",
        "a7e7",
        "3003d344fc2d4c87",
        {
            "3inst": ("be21 396b 367c b874 3b68 35cf", "f3126e89e05d2df5"),
            "mcg": ("b680 b969 b59d bd5e b290 3bf3", "179b3195357ea365"),
            "mul1": ("24bc 37c4 3bac b5c5 bdf6 bb98", "9b40214d99db8825"),
        },
    ),
    RateVector(
        8,
        "ae47 4c7e eab5 88ec",
        "594c 4c7e 7eae ae47",
        "8d59",
        "6b8a3f60c7bc9445",
        {
            "3inst": ("ba22 be4d 23c0 2120 411a b080", "4714396d203a90fe"),
            "mcg": ("2c58 3c4c 3b9a 3ea3 bf5a bc46", "56b1d62abf2c35dc"),
            "mul1": ("381a bfdb b821 bd20 3317 3c1b", "7ad70ece75bb44a0"),
        },
    ),
)

# 128 x 128 layer at 4 bits: SHA of the decoded matrix; W[0,0], W[0,1], W[1,0], W[127,127];
# y[0], y[1], y[127], sum of y, norm of y.
LAYER = {
    "3inst": (
        "d0c206ed9ec01d99",
        (-0.002584860, -0.018377772, -0.002100170, -0.020747613),
        (-0.3829477, 1.4511313, 0.8058601, 19.619276, 12.710695),
    ),
    "mcg": (
        "d9191e95b2245836",
        (0.012384154, 0.007232371, -0.075631812, -0.040399404),
        (-1.1250058, 2.1112283, 0.8554412, -2.511753, 12.010464),
    ),
    "mul1": (
        "216a518c4d8c58d0",
        (-0.002476502, -0.037871986, -0.010367408, 0.008890742),
        (-0.3712984, -0.6915246, 0.7634317, -12.264794, 9.379381),
    ),
}

# bits: first states, first 16 hex digits of the states' SHA-256, sum of value * scale
EMBEDDING_RING = {
    4: ("f336 3367 3674 6744", "8fbf451261b7b501", -1.181743),
    6: ("effa fea1 a854 152c", "5fbaa30f68f1204e", 0.883614),
}


def ramp(count: int, offset: int) -> np.ndarray:
    """The words (40503 * (q + 1) + offset) modulo 2^16 for q below `count`, as int16."""
    q = np.arange(count, dtype=np.int64)
    return ((40503 * (q + 1) + offset) & 0xFFFF).astype(np.uint16).view(np.int16)


def hex16(text: str) -> np.ndarray:
    """Hex words such as `dead beef` as uint16."""
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint16)
