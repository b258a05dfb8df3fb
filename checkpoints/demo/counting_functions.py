"""Common functions on digits, ranges, units and truth values, in the format of `checkpoints.demo.singles`."""

BLOCKS = """
sum_to sum_up_to sum_of_first_n sum_first sum_to_number sum_1_to_n|count:n,number,limit,k
=the sum of the numbers from 1 to $a
=the sum of the first $a integers
-return sum(range(1, $a + 1))
-return $a * ($a + 1) // 2

sum_recursive recursive_sum_to|count:n,k,number
=the sum of the numbers from 1 to $a, by recursion
-if $a == 0:
    return 0
return $a + $f($a - 1)

countdown count_down|count:n,start,number
=a list of the numbers from $a down to 1
-return list(range($a, 0, -1))

count_up numbers_up_to first_n list_to|count:n,limit,number
=a list of the numbers from 1 to $a
-return list(range(1, $a + 1))

first_multiples multiples get_multiples|count:n,number,x small:count,k,m
=the first $b multiples of $a
-return [$a * $i for $i in range(1, $b + 1)]

times_table multiplication_table|count:n,number,x
=a list of the multiples of $a from 1 to 10
-return [$a * $i for $i in range(1, 11)]

digit_sum sum_digits sum_of_digits add_digits digits_sum|count:n,number,num,x
=the sum of the digits of $a
!add up the digits of $a
-return sum(int(d) for d in str($a))
-$t = 0
while $a > 0:
    $t += $a % 10
    $a //= 10
return $t

count_digits number_of_digits digit_count num_digits|count:n,number,x
=the number of digits of $a
-return len(str($a))

reverse_number reverse_digits reverse_integer|count:n,number,x
=$a with its digits reversed
-return int(str($a)[::-1])

digits get_digits to_digits list_digits|count:n,number,x
=a list of the digits of $a
-return [int(d) for d in str($a)]

product_of_digits digit_product|count:n,number,x
=the product of the digits of $a
-$r = 1
for d in str($a):
    $r *= int(d)
return $r

is_palindrome_number palindrome_number|count:n,number,x
?$a reads the same backwards
-return str($a) == str($a)[::-1]

to_binary binary binary_string|count:n,number,x
=$a in binary, as a string
-return bin($a)[2:]

count_bits count_ones bit_count|count:n,number,x
=the number of ones in the binary form of $a
-return bin($a).count("1")

to_hex hexadecimal hex_string|count:n,number,x
=$a in hexadecimal, as a string
-return hex($a)[2:]

collatz_next next_collatz collatz_step|count:n,number,x
=the next number of the Collatz sequence after $a
-if $a % 2 == 0:
    return $a // 2
return 3 * $a + 1

collatz_length collatz_steps|count:n,number,x
=the number of Collatz steps from $a to 1
-$n = 0
while $a != 1:
    $a = $a // 2 if $a % 2 == 0 else 3 * $a + 1
    $n += 1
return $n

fizzbuzz fizz_buzz|count:n,number,i,x
='FizzBuzz' if $a is divisible by 15, 'Fizz' by 3, 'Buzz' by 5, else $a as a string
-if $a % 15 == 0:
    return "FizzBuzz"
if $a % 3 == 0:
    return "Fizz"
if $a % 5 == 0:
    return "Buzz"
return str($a)

is_leap_year leap_year is_leap check_leap_year|year:year,y,years,n
?$a is a leap year
-return $a % 4 == 0 and ($a % 100 != 0 or $a % 400 == 0)

days_in_year year_length|year:year,y
=the number of days in $a
-return 366 if $a % 4 == 0 and ($a % 100 != 0 or $a % 400 == 0) else 365

grade letter_grade get_grade|count:score,points,mark
='A' from 90, 'B' from 80, 'C' from 70, else 'F'
-if $a >= 90:
    return "A"
if $a >= 80:
    return "B"
if $a >= 70:
    return "C"
return "F"

even_or_odd parity odd_or_even|number
='even' or 'odd'
-return "even" if $a % 2 == 0 else "odd"

describe_sign sign_name|number
='positive', 'negative' or 'zero'
-if $a > 0:
    return "positive"
if $a < 0:
    return "negative"
return "zero"

celsius_to_fahrenheit c_to_f to_fahrenheit convert_to_fahrenheit|float:celsius,c,degrees,temperature,temp
=a temperature in Fahrenheit, given in Celsius
!convert Celsius to Fahrenheit
-return $a * 9 / 5 + 32

fahrenheit_to_celsius f_to_c to_celsius convert_to_celsius|float:fahrenheit,f,degrees,temperature
=a temperature in Celsius, given in Fahrenheit
!convert Fahrenheit to Celsius
-return ($a - 32) * 5 / 9

circle_area area_of_circle|float:radius,r
=the area of a circle with radius $a
-return 3.14159 * $a ** 2

circumference circle_circumference|float:radius,r
=the circumference of a circle with radius $a
-return 2 * 3.14159 * $a

rectangle_area area area_of_rectangle rect_area|count:width,w,length,a count:height,h,breadth,b
=the area of a rectangle
-return $a * $b

rectangle_perimeter perimeter|count:width,w,length,a count:height,h,breadth,b
=the perimeter of a rectangle
-return 2 * ($a + $b)

square_area area_of_square|count:side,s,length,a
=the area of a square with side $a
-return $a * $a

triangle_area area_of_triangle|count:base,b,width count:height,h
=the area of a triangle
-return $a * $b / 2

box_volume volume cuboid_volume|count:length,l,a count:width,w,b count:height,h,c
=the volume of a box
-return $a * $b * $c

cube_volume volume_of_cube|count:side,s,a
=the volume of a cube with side $a
-return $a ** 3

minutes_to_seconds to_seconds|count:minutes,m,n
=$a minutes in seconds
-return $a * 60

hours_to_minutes to_minutes|count:hours,h,n
=$a hours in minutes
-return $a * 60

hours_to_seconds|count:hours,h,n
=$a hours in seconds
-return $a * 3600

days_to_hours|count:days,d,n
=$a days in hours
-return $a * 24

seconds_to_minutes|count:seconds,s,n
=$a seconds in minutes
-return $a / 60

kilometers_to_meters km_to_m|count:kilometers,km,n
=$a kilometers in meters
-return $a * 1000

percentage percent percent_of|count:part,value,a count:whole,total,b
=$a as a percentage of $b
-return $a / $b * 100

discounted discount_price apply_discount|count:price,amount,p count:percent,discount,rate
=$a less $b percent
-return $a * (100 - $b) / 100

simple_interest interest|count:principal,p,amount count:rate,r,percent count:years,t,time
=the simple interest on $a at $b percent for $c years
-return $a * $b * $c / 100

is_true is_truthy truthy|number:value,x,v
?$a is true
-return bool($a)

invert logical_not negation flip|condition
=the opposite of $a
-return not $a

logical_and both both_true|condition condition
?both $a and $b are true
-return $a and $b

logical_or either either_true|condition condition
?$a or $b is true
-return $a or $b

xor exclusive_or exactly_one|condition condition
?exactly one of $a and $b is true
-return $a != $b
"""
