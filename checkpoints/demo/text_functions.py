"""Common functions on strings, in the format of `checkpoints.demo.singles`."""

BLOCKS = """
reverse_string reverse reversed_text reverse_text string_reverse backwards|text
=$a reversed
!reverse a string
-return $a[::-1]
-return "".join(reversed($a))

reverse_recursive reverse_string_recursive|text
=$a reversed, by recursion
-if not $a:
    return ""
return $f($a[1:]) + $a[0]

is_palindrome palindrome check_palindrome is_palindromic|text
?$a is a palindrome
?$a reads the same backwards
-return $a == $a[::-1]

is_palindrome_ignoring_case is_palindrome_ignore_case|text
?$a is a palindrome, ignoring case
-$a = $a.lower()
return $a == $a[::-1]

to_upper upper uppercase to_uppercase make_upper shout|text
=$a in upper case
!convert a string to upper case
-return $a.upper()

to_lower lower lowercase to_lowercase make_lower|text
=$a in lower case
!convert a string to lower case
-return $a.lower()

capitalize capitalized capitalize_first|text
=$a with its first letter in upper case
!capitalize a string
-return $a.capitalize()

title_case to_title titlecase|text
=$a in title case
-return $a.title()

capitalize_words capitalize_each_word capitalize_all_words|text
=$a with every word capitalized
!capitalize each word of $a
-return " ".join($w.capitalize() for $w in $a.split())

swap_case swapcase invert_case|text
=$a with upper and lower case swapped
-return $a.swapcase()

string_length length text_length count_characters count_chars|text
=the length of $a
=the number of characters in $a
-return len($a)

count_words word_count number_of_words num_words words_count|text
=the number of words in $a
!count the words in a string
-return len($a.split())

count_vowels vowel_count number_of_vowels num_vowels vowels_in|text
=the number of vowels in $a
!count the vowels in a string
-return sum(1 for $x in $a if $x in "aeiou")
-$n = 0
for $x in $a:
    if $x in "aeiou":
        $n += 1
return $n

count_consonants consonant_count number_of_consonants|text
=the number of consonants in $a
-return sum(1 for $x in $a if $x.isalpha() and $x not in "aeiou")

count_lines line_count number_of_lines|text
=the number of lines in $a
-return len($a.splitlines())

count_spaces space_count|text
=the number of spaces in $a
-return $a.count(" ")

count_digits_in_text digits_in_string|text
=the number of digits in $a
-return sum(1 for $x in $a if $x.isdigit())

count_uppercase count_capitals uppercase_count|text
=the number of upper-case letters in $a
-return sum(1 for $x in $a if $x.isupper())

count_letter count_char count_character letter_count occurrences_of|text letter
=the number of times $b occurs in $a
!count how often $b occurs in $a
-return $a.count($b)

count_substring substring_count count_occurrences_of|text part
=the number of times $b occurs in $a
-return $a.count($b)

letter_frequency char_count count_letters character_counts char_frequency letter_counts count_each_letter|text
=a dict of how often each character of $a occurs
!count each character of $a
-$r = {}
for $x in $a:
    $r[$x] = $r.get($x, 0) + 1
return $r

word_frequency count_each_word word_counts word_frequencies|text
=a dict of how often each word of $a occurs
!count each word of $a
-$r = {}
for $w in $a.split():
    $r[$w] = $r.get($w, 0) + 1
return $r

most_common_letter most_frequent_char most_common_character|some_text
=the most common character of $a
-return max($a, key=$a.count)

unique_letters unique_characters distinct_characters|text
=the set of characters in $a
-return set($a)

count_unique_letters count_distinct_characters number_of_unique_characters|text
=the number of different characters in $a
-return len(set($a))

has_unique_characters all_unique_characters is_isogram|text
?all characters of $a are different
-return len(set($a)) == len($a)

remove_spaces strip_spaces delete_spaces without_spaces remove_whitespace|text
=$a without spaces
!remove all spaces from $a
-return $a.replace(" ", "")

remove_vowels without_vowels delete_vowels strip_vowels|text
=$a without its vowels
!remove the vowels from $a
-return "".join($x for $x in $a if $x not in "aeiou")

keep_vowels only_vowels get_vowels|text
=the vowels of $a
-return "".join($x for $x in $a if $x in "aeiou")

remove_digits without_digits strip_digits|text
=$a without its digits
-return "".join($x for $x in $a if not $x.isdigit())

keep_digits only_digits extract_digits|text
=the digits of $a
-return "".join($x for $x in $a if $x.isdigit())

remove_punctuation keep_letters_and_spaces|text
=$a without punctuation
-return "".join($x for $x in $a if $x.isalnum() or $x == " ")

remove_letter remove_char delete_letter remove_character without_letter|text letter
=$a without the character $b
!remove every $b from $a
-return $a.replace($b, "")

replace_letter replace_char substitute|text letter:old,a,before letter:new,b,after
=$a with every $b replaced by $c
!replace $b by $c in $a
-return $a.replace($b, $c)

replace_spaces spaces_to_underscores to_snake underscore|text
=$a with its spaces replaced by underscores
-return $a.replace(" ", "_")

slugify slug to_slug|text
=$a in lower case with hyphens for spaces
-return $a.lower().replace(" ", "-")

repeat repeat_string repeat_text multiply_string|text small
=$a repeated $b times
!repeat $a $b times
-return $a * $b

starts_with begins_with has_prefix is_prefix|text part:prefix,start,beginning,p
?$a starts with $b
?$a begins with $b
-return $a.startswith($b)

ends_with has_suffix finishes_with is_suffix|text part:suffix,ending,end,s
?$a ends with $b
-return $a.endswith($b)

contains_substring contains_text has_substring includes_text is_substring|text part
?$a contains $b
?$b occurs in $a
-return $b in $a

find_substring index_of_substring position_of|text part
=the index of $b in $a, or -1
-return $a.find($b)

first_letter first_character first_char get_first_letter|some_text
=the first letter of $a
-return $a[0]

last_letter last_character last_char get_last_letter|some_text
=the last letter of $a
-return $a[-1]

first_word get_first_word|some_text
=the first word of $a
-return $a.split()[0]

last_word get_last_word|some_text
=the last word of $a
-return $a.split()[-1]

first_letters prefix_of take_letters first_chars|text small
=the first $b characters of $a
-return $a[:$b]

last_letters suffix_of last_chars|text small
=the last $b characters of $a
-return $a[-$b:]

remove_first_letter drop_first_letter without_first|text
=$a without its first character
-return $a[1:]

remove_last_letter drop_last_letter without_last|text
=$a without its last character
-return $a[:-1]

remove_first_and_last strip_ends trim_ends|text
=$a without its first and last characters
-return $a[1:-1]

nth_letter char_at letter_at|some_text small:n,index,i,position
=the character of $a at index $b, or an empty string
-return $a[$b] if $b < len($a) else ""

every_other_letter every_second_letter alternate_letters|text
=every second character of $a
-return $a[::2]

split_words words get_words to_words|text
=a list of the words of $a
!split a string into words
-return $a.split()

split_lines lines get_lines|text
=a list of the lines of $a
-return $a.splitlines()

split_commas split_by_comma parse_csv|text
=the parts of $a between commas
-return $a.split(",")

to_letters letters characters list_characters to_chars|text
=a list of the characters of $a
-return list($a)

reverse_words reversed_words reverse_word_order|text
=$a with its words in reverse order
!reverse the order of the words in $a
-return " ".join($a.split()[::-1])

reverse_each_word reverse_letters_of_words|text
=$a with each word reversed
-return " ".join($w[::-1] for $w in $a.split())

sort_letters sorted_letters sort_string sort_characters|text
=$a with its characters sorted
-return "".join(sorted($a))

sort_words_in_text sort_words_of|text
=$a with its words sorted
-return " ".join(sorted($a.split()))

longest_word find_longest_word get_longest_word|some_text
=the longest word of $a
-return max($a.split(), key=len)

shortest_word find_shortest_word get_shortest_word|some_text
=the shortest word of $a
-return min($a.split(), key=len)

acronym make_acronym initials get_initials abbreviation|text
=the first letters of the words of $a in upper case
-return "".join($w[0].upper() for $w in $a.split())

word_lengths_of lengths_of_words_in|text
=a list of the lengths of the words in $a
-return [len($w) for $w in $a.split()]

strip trim strip_text strip_whitespace|text
=$a without spaces at its ends
-return $a.strip()

is_blank blank is_empty_string empty_text|text
?$a has nothing but spaces
-return $a.strip() == ""

is_upper is_uppercase all_caps|text
?$a is in upper case
-return $a.isupper()

is_lower is_lowercase|text
?$a is in lower case
-return $a.islower()

is_numeric is_number is_digits only_digits_in|text
?$a consists of digits
-return $a.isdigit()

is_alphabetic is_alpha only_letters|text
?$a consists of letters
-return $a.isalpha()

has_digit contains_digit has_number has_digits|text
?$a contains a digit
-return any($x.isdigit() for $x in $a)

has_uppercase contains_uppercase has_capital|text
?$a contains an upper-case letter
-return any($x.isupper() for $x in $a)

has_vowel contains_vowel has_vowels|text
?$a contains a vowel
-return any($x in "aeiou" for $x in $a)

is_vowel vowel check_vowel|letter
?$a is a vowel
-return $a in "aeiou"

is_consonant consonant check_consonant|letter
?$a is a consonant
-return $a not in "aeiou"

are_anagrams is_anagram anagram anagrams check_anagram|text text
?$a and $b are anagrams
?$a and $b have the same letters
-return sorted($a) == sorted($b)

concatenate concat join_strings join_two combine_strings|text text
=$a and $b joined
!concatenate two strings
-return $a + $b

join_with_space full_name join_names|text text
=$a and $b with a space between them
-return $a + " " + $b

same_length equal_length have_same_length|text text
?$a and $b have the same length
-return len($a) == len($b)

longer_string longer longer_of|text text
=the longer of $a and $b
-return $a if len($a) >= len($b) else $b

common_letters common_characters shared_letters|text text
=the set of characters in both $a and $b
-return set($a) & set($b)

equal_ignoring_case same_ignoring_case equals_ignore_case|text text
?$a and $b are equal, ignoring case
-return $a.lower() == $b.lower()

hamming_distance count_differences|text text
=the number of positions where $a and $b differ
-return sum(1 for $x, $y in zip($a, $b) if $x != $y)

greet greeting say_hello hello|text:name,person,who,user
=a greeting for $a
!greet a person
-return "Hello, " + $a + "!"
-return f"Hello, {$a}!"

surround wrap enclose|text letter:mark,char,edge,c
=$a with $b on both sides
-return $b + $a + $b

quote in_quotes add_quotes|text
=$a in double quotes
-return '"' + $a + '"'

in_brackets parenthesize in_parentheses|text
=$a in round brackets
-return "(" + $a + ")"

pad_left left_pad align_right|text count:width,length,size
=$a padded with spaces on the left to $b characters
-return $a.rjust($b)

pad_right right_pad align_left|text count:width,length,size
=$a padded with spaces on the right to $b characters
-return $a.ljust($b)

center centered center_text|text count:width,length,size
=$a centered in $b characters
-return $a.center($b)

zero_pad pad_with_zeros|count:n,number,x count:width,length,size
=$a as a string of $b digits with leading zeros
-return str($a).zfill($b)

truncate shorten cut|text count:limit,length,n,size
=$a cut to $b characters
-return $a[:$b]

double_letters double_characters repeat_letters|text
=$a with every character doubled
-return "".join($x * 2 for $x in $a)

char_code ascii_code code_of letter_code|letter
=the character code of $a
-return ord($a)

letter_position alphabet_position position_in_alphabet|letter
=the position of $a in the alphabet, from 1
-return ord($a) - ord("a") + 1

next_letter following_letter|letter
=the letter after $a
-return chr(ord($a) + 1)

parse_int to_int to_integer string_to_int|count:text,s,string,digits
=$a as an integer
-return int($a)

to_string to_text as_string stringify_number|number
=$a as a string
-return str($a)

word_index index_words positions_of_words|text
=a dict from each word of $a to its position
-return {$w: $i for $i, $w in enumerate($a.split())}

compress run_length encode_runs|text
=a list of pairs of each run of equal characters in $a and its length
-$r = []
for $x in $a:
    if $r and $r[-1][0] == $x:
        $r[-1] = ($x, $r[-1][1] + 1)
    else:
        $r.append(($x, 1))
return $r
"""
